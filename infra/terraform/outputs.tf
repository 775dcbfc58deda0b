output "credentials" {
  description = "Command that makes a kubeconfig context"
  value       = "gcloud container clusters get-credentials ${google_container_cluster.main.name} --region ${var.region} --project ${var.project}"
}

output "images" {
  description = "Where images are pushed to"
  value       = "${var.region}-docker.pkg.dev/${var.project}/${google_artifact_registry_repository.images.repository_id}"
}

output "runs" {
  value = "gs://${google_storage_bucket.runs.name}"
}

output "data" {
  value = "gs://${google_storage_bucket.data.name}"
}

output "placement_policies" {
  description = "gke.placement_policy of the launch profiles, by topology"
  value       = { for k, p in google_compute_resource_policy.tpu7x : k => p.name }
}
