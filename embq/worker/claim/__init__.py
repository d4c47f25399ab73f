"""Claiming: which model is served, how many units are claimed, and the leases on them."""
