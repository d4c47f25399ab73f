"""Part files: one module per format, which reads and writes it, and `part` for the files of one commit record."""
