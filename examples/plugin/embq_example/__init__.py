"""A plug-in of embq: the model family `letters`, the kind of input `mbox` and the map `without-quotes`."""
