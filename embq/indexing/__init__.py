"""What `embq index` does beside building: it plans, and shows how far a build is."""
