"""Results of runs in Python: `embq.open`."""
