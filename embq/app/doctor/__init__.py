"""Checks of this machine, the broker and the fleet: `embq doctor` and `embq worker --check`."""
