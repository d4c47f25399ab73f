"""Random small mutants of embq, and how many of them the tests notice: `make mutants`."""
