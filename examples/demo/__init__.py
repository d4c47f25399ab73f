"""Real data that every machine has: for the demo, and for tests that compare with reference implementations."""
