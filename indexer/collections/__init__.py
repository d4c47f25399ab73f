"""What is indexed, one file for each kind of folder that embeddings come in."""
