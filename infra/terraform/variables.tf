variable "project" {
  description = "Google Cloud project id"
  type        = string
}

variable "region" {
  description = "Region of the cluster and the buckets: the one that has your TPUs"
  type        = string
}

variable "zones" {
  description = "Zones of the node pools; a TPU slice lives in one"
  type        = list(string)
}

variable "name" {
  description = "Prefix of everything that is made"
  type        = string
  default     = "olmo"
}

variable "namespace" {
  description = "Kubernetes namespace of the jobs (infra/k8s/namespace.yaml)"
  type        = string
  default     = "olmo"
}

variable "authorized_networks" {
  description = "CIDR blocks that may reach the Kubernetes API, by name"
  type        = map(string)
}

variable "release_channel" {
  description = "TPU7x needs 1.34.0-gke.2201000 or newer"
  type        = string
  default     = "REGULAR"
}

variable "cpu_nodes" {
  description = "Upper limit of n2-standard-16 machines for conversion, indexing and smoke runs (0 when idle)"
  type        = number
  default     = 2
}

variable "tpu_slices" {
  description = <<-EOT
    TPU node pools: one a slice. Costs run from creation to deletion, used or not, unless spot or flex-start.
    machine_type, hosts and topology are those of `olmo-jax hardware`; family is v5p, v6e or tpu7x.
    capacity is on-demand, spot, flex-start or reservation (then reservation names it).
  EOT
  type = map(object({
    family       = string
    machine_type = string
    topology     = string
    hosts        = number
    zone         = string
    capacity     = optional(string, "on-demand")
    reservation  = optional(string)
  }))
  default = {}

  validation {
    condition     = alltrue([for s in var.tpu_slices : contains(["v5p", "v6e", "tpu7x"], s.family)])
    error_message = "family is v5p, v6e or tpu7x."
  }

  validation {
    condition     = alltrue([for s in var.tpu_slices : (s.capacity == "reservation") == (s.reservation != null)])
    error_message = "capacity \"reservation\" and a reservation's name go together."
  }
}

variable "keep_runs_days" {
  description = "Files of the runs bucket under tmp/ are deleted after so many days; checkpoints are never"
  type        = number
  default     = 14
}
