"""`embq train classify`: one training loop, whichever launcher started its processes."""
