"""A plug-in of embq: the model family `letters`, the kind of input `hdf5` and the map `without-quotes`."""
