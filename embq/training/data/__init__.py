"""Input pipeline of `embq train classify`: from shards to batches, with an account of every sample."""
