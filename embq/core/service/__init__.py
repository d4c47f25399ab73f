"""Parts of a resident service: log, metrics, health, reports, stopping."""
