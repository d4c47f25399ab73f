"""Child process that runs parsers which can crash or exhaust memory, under limits of memory and processor time."""
