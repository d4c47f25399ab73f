"""`embq plan`: time, cost and needs of a run on devices that are not there yet."""
