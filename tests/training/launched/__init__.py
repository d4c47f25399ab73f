"""A training that is all launching: what the tests of launchers have started."""
