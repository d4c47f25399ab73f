"""Measurements. Each module prints a table and writes bench/results/<name>.json, with the machine it ran on."""
