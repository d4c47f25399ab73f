"""The supervisor of a machine: its devices and one worker process for each."""
