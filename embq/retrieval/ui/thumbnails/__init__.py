"""Thumbnails of the rows of an index, from the inputs of its run.

A request passes `routes` (index, row, ETag), `finder` (row to unit and key), `cache` (on disk), `images` (unit and key
to the encoded image) and `decoder` (encoded image to JPEG, in a process of its own: `decoder_process`).
"""
