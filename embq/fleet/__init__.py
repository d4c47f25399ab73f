"""Workers on many machines: `embq fleet`, by ssh, Slurm, Kubernetes or Ray."""
