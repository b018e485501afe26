"""Attention over keys and values of 8 bits."""
