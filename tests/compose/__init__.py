"""The stack on a container engine: `make test-compose`."""
