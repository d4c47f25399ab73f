"""The experiments of `embq bench`: how speed depends on workers, devices and the size of units."""
