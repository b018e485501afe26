"""Reductions over any axis."""
