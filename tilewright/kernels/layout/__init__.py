"""Copies of a tensor in another order of dimensions."""
