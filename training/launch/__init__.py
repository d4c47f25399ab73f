"""One training on several devices: started on this machine, over ssh or by Ray, stopped as one, with one outcome."""
