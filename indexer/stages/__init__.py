"""The stages of a build: each reads files and writes files, and depends on nothing else."""
