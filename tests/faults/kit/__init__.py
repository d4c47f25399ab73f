"""Shared by the fault tests: services as on several machines, sabotage inside of them, and the table of results."""
