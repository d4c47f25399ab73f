"""Reading committed parts: one file for each kind of file, and `joined` for the aligned files of one record."""
