"""Commands on other machines: by ssh, by Slurm's srun, on a Ray cluster."""
