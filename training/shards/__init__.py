"""Webdataset shards: made of pictures, counted, checked and served."""
