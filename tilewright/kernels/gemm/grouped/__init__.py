"""Grouped products: rows sorted by expert, and one weight per expert."""
