# Tokens and weights: written once, read by every host.
resource "google_storage_bucket" "data" {
  name                        = "${var.project}-${var.name}-data"
  location                    = var.region
  uniform_bucket_level_access = true
  public_access_prevention    = "enforced"
}

# Run roots: checkpoints, metrics, logs, Metaflow's artifacts.
resource "google_storage_bucket" "runs" {
  name                        = "${var.project}-${var.name}-runs"
  location                    = var.region
  uniform_bucket_level_access = true
  public_access_prevention    = "enforced"

  soft_delete_policy {
    retention_duration_seconds = 0 # a deleted 7B checkpoint would be paid for another week
  }

  lifecycle_rule {
    condition {
      age            = var.keep_runs_days
      matches_prefix = ["tmp/"]
    }
    action { type = "Delete" }
  }

  lifecycle_rule {
    condition { age = 7 }
    action { type = "AbortIncompleteMultipartUpload" }
  }
}

resource "google_artifact_registry_repository" "images" {
  repository_id = var.name
  location      = var.region
  format        = "DOCKER"

  cleanup_policies {
    id     = "keep-recent"
    action = "KEEP"
    most_recent_versions { keep_count = 20 }
  }
}
