"""State of runs, uploads and services: read, derived, rendered and changed."""
