"""Texts: tokens, splitting, forward passes without padding, int8."""
