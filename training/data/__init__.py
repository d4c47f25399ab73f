"""What reaches a training step: shards in, batches of images and labels out, and an account of every sample."""
