"""The writer service: one process turns published results into committed parts, exactly once per unit."""
