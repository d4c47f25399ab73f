"""Durable files, paths and object stores."""
