"""Embedding bags and the gradient of an embedding's table."""
