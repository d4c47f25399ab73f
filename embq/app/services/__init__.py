"""Start-up, metrics and health endpoints of the resident services."""
