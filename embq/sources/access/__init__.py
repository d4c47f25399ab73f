"""Files on this machine and behind URLs: status, listings, reads, and the hosts that may be read from."""
