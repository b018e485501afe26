"""Optimizer steps: one launch updates all tensors of a model."""
