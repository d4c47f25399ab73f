"""`embq bench`: experiments on workers, devices, unit size and images."""
