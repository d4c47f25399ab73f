"""Limits of this process: cores, memory, libraries."""
