"""What resident services tell Prometheus, and whether they are well."""
