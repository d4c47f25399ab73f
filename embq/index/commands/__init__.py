"""`embq index`: plans and builds an index, grows it, deletes from it, compacts it."""
