locals {
  oauth_scopes = ["https://www.googleapis.com/auth/cloud-platform"]
  # Slices of one topology share a policy: pods choose nodes by its name, whichever slice they are of.
  tpu7x_hosts = { for k, s in var.tpu_slices : s.topology => s.hosts... if s.family == "tpu7x" && s.hosts > 1 }
}

# Controllers of JobSet and Kueue, and the small pods of an unattended flow.
resource "google_container_node_pool" "system" {
  name       = "system"
  cluster    = google_container_cluster.main.id
  node_count = 1

  node_config {
    machine_type    = "e2-standard-4"
    service_account = google_service_account.nodes.email
    oauth_scopes    = local.oauth_scopes
    workload_metadata_config { mode = "GKE_METADATA" }
  }
}

resource "google_container_node_pool" "cpu" {
  name    = "cpu"
  cluster = google_container_cluster.main.id

  autoscaling {
    total_min_node_count = 0
    total_max_node_count = var.cpu_nodes
    location_policy      = "ANY"
  }

  node_config {
    machine_type    = "n2-standard-16"
    service_account = google_service_account.nodes.email
    oauth_scopes    = local.oauth_scopes
    workload_metadata_config { mode = "GKE_METADATA" }
  }
}

# TPU7x slices of several hosts are placed by a workload policy; v5p and v6e by the node pool's own placement policy.
resource "google_compute_resource_policy" "tpu7x" {
  for_each = local.tpu7x_hosts
  name     = "tpu7x-${each.value[0] * 8}-${each.key}-placement-policy"
  region   = var.region

  workload_policy {
    type                 = "HIGH_THROUGHPUT"
    accelerator_topology = each.key
  }
}

resource "google_container_node_pool" "tpu" {
  for_each       = var.tpu_slices
  name           = each.key
  cluster        = google_container_cluster.main.id
  node_locations = [each.value.zone]
  node_count     = each.value.capacity == "flex-start" ? null : each.value.hosts

  dynamic "autoscaling" {
    for_each = each.value.capacity == "flex-start" ? [1] : []
    content {
      total_min_node_count = 0
      total_max_node_count = each.value.hosts
      location_policy      = "ANY"
    }
  }

  dynamic "placement_policy" {
    for_each = each.value.hosts > 1 ? [1] : []
    content {
      type         = "COMPACT"
      tpu_topology = each.value.family == "tpu7x" ? null : each.value.topology
      policy_name  = each.value.family == "tpu7x" ? google_compute_resource_policy.tpu7x[each.value.topology].name : null
    }
  }

  node_config {
    machine_type    = each.value.machine_type
    disk_type       = each.value.family == "tpu7x" ? "hyperdisk-balanced" : null # TPU7x machines take no other
    spot            = each.value.capacity == "spot"
    flex_start      = each.value.capacity == "flex-start"
    service_account = google_service_account.nodes.email
    oauth_scopes    = local.oauth_scopes
    workload_metadata_config { mode = "GKE_METADATA" }
    gvnic { enabled = true }

    dynamic "reservation_affinity" {
      for_each = each.value.capacity == "reservation" ? [1] : []
      content {
        consume_reservation_type = "SPECIFIC_RESERVATION"
        key                      = "compute.googleapis.com/reservation-name"
        values                   = [each.value.reservation]
      }
    }
    dynamic "reservation_affinity" {
      for_each = each.value.capacity == "flex-start" ? [1] : []
      content { consume_reservation_type = "NO_RESERVATION" }
    }
  }

  management {
    auto_repair  = each.value.capacity != "flex-start" # such machines are replaced, not repaired
    auto_upgrade = true
  }

  lifecycle {
    ignore_changes = [node_config[0].resource_labels]
  }
}
