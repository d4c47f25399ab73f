"""The producer service: turns inputs into a run's manifest, and feeds its units to the queue."""
