"""Attention over a paged cache, and the operators that write to that cache."""
