"""The files of an index on disk: versions, inverted lists, trained template, rows and identities."""
