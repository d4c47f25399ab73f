"""What every training has: its folder, journals of steps, scratch space, and a line of progress."""
