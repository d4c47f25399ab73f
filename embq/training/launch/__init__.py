"""Launchers of a training: processes on this machine, on hosts over ssh, or on a Ray cluster, with one outcome."""
