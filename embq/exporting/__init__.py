"""The steps of `embq export`, one file each: an order of rows, what is stored of them, a folder that is whole."""
