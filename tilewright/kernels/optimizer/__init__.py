"""Updates of parameters: one launch for all tensors of a model."""
