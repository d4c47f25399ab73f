"""The fleet page: runs, machines and devices, live and as the commit log tells them."""
