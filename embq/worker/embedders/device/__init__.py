"""The device: placement, precision, memory, batch size, and trials of faster ways to compute."""
