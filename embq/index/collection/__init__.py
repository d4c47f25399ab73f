"""The vectors that are indexed: output of a run, or plain files of vectors."""
