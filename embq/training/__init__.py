"""Shards, training on them, and the MMoCLIP benchmark: stands on the rest of embq, and nothing of it imports this."""
