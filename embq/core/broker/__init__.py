"""Connecting to the broker: client, address, TLS, retries, the embedded server, users."""
