"""Serves ordinary models in separate processes, with batching, checks, and replacement of processes that fail."""
