"""Runs on this machine alone: `embq run` and `embq resume` without a resident broker."""
