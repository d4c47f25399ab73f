"""The pipeline of one worker process: read, prepare, embed, publish."""
