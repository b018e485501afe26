"""Attention over a paged cache, and what writes to that cache."""
