"""Grouped products: rows sorted by expert, a weight for each expert."""
