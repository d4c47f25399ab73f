"""Training a classifier on shards: one loop, whatever started its processes."""
