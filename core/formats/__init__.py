"""Part files: one module per format, and `part` for the files of one commit record."""
