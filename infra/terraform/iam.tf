# What the machines themselves may do: logs, metrics, pulling images. Not the buckets.
resource "google_service_account" "nodes" {
  account_id   = "${var.name}-nodes"
  display_name = "GKE nodes of ${var.name}"
}

resource "google_project_iam_member" "nodes" {
  for_each = toset([
    "roles/logging.logWriter",
    "roles/monitoring.metricWriter",
    "roles/monitoring.viewer",
    "roles/stackdriver.resourceMetadata.writer",
  ])
  project = var.project
  role    = each.value
  member  = google_service_account.nodes.member
}

resource "google_artifact_registry_repository_iam_member" "nodes" {
  location   = google_artifact_registry_repository.images.location
  repository = google_artifact_registry_repository.images.name
  role       = "roles/artifactregistry.reader"
  member     = google_service_account.nodes.member
}

# What pods may do, by their Kubernetes account: no keys, no Google account in between.
data "google_project" "this" {}

locals {
  pool = join("/", [
    "principal://iam.googleapis.com/projects/${data.google_project.this.number}",
    "locations/global/workloadIdentityPools/${var.project}.svc.id.goog/subject/ns/${var.namespace}/sa",
  ])
  trainer    = "${local.pool}/trainer"
  controller = "${local.pool}/controller"
}

resource "google_storage_bucket_iam_member" "trainer_reads" {
  bucket = google_storage_bucket.data.name
  role   = "roles/storage.objectViewer"
  member = local.trainer
}

resource "google_storage_bucket_iam_member" "runs" {
  for_each = { trainer = local.trainer, controller = local.controller }
  bucket   = google_storage_bucket.runs.name
  role     = "roles/storage.objectUser"
  member   = each.value
}

resource "google_storage_bucket_iam_member" "runs_bucket" {
  for_each = { trainer = local.trainer, controller = local.controller }
  bucket   = google_storage_bucket.runs.name
  role     = "roles/storage.legacyBucketReader" # Orbax and gcsfs look at the bucket itself
  member   = each.value
}
