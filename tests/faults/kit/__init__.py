"""What the fault tests share: services as on several machines, sabotage inside of them, and the table of results."""
