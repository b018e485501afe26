"""The one error of model folders."""

__all__ = ["ModelError"]


class ModelError(ValueError):
    """A model folder that cannot be used: what is wrong, and what to do."""
