"""Experiments on small models that show how training behaves."""
