"""A Kubernetes cluster on loopback: an API server, JobSet and Kueue as scripts, and pods that are local processes."""
