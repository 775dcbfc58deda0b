resource "google_compute_network" "main" {
  name                    = var.name
  auto_create_subnetworks = false
  mtu                     = 8896 # large frames between TPU hosts
}

resource "google_compute_subnetwork" "main" {
  name                     = var.name
  region                   = var.region
  network                  = google_compute_network.main.id
  ip_cidr_range            = "10.0.0.0/16"
  private_ip_google_access = true

  secondary_ip_range {
    range_name    = "pods"
    ip_cidr_range = "10.4.0.0/14"
  }
  secondary_ip_range {
    range_name    = "services"
    ip_cidr_range = "10.8.0.0/20"
  }
}

# Hosts of a job talk on jax.distributed's port (8482), libtpu's (8471), the multislice coordinator's (8080) and the
# runtime metrics' (8431); jax moved its port once, and GKE's automatic rules lagged. So: everything inside.
resource "google_compute_firewall" "inside" {
  name      = "${var.name}-inside"
  network   = google_compute_network.main.id
  direction = "INGRESS"
  source_ranges = [
    google_compute_subnetwork.main.ip_cidr_range,
    google_compute_subnetwork.main.secondary_ip_range[0].ip_cidr_range,
  ]
  allow { protocol = "tcp" }
  allow { protocol = "udp" }
  allow { protocol = "icmp" }
}

resource "google_compute_router" "nat" {
  name    = var.name
  region  = var.region
  network = google_compute_network.main.id
}

resource "google_compute_router_nat" "nat" {
  name                               = var.name
  router                             = google_compute_router.nat.name
  region                             = var.region
  nat_ip_allocate_option             = "AUTO_ONLY"
  source_subnetwork_ip_ranges_to_nat = "ALL_SUBNETWORKS_ALL_IP_RANGES"
}
