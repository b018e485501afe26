"""The gradients of attention."""
