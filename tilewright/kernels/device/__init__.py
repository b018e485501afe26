"""Triton functions that kernels of several wings call. No ops."""
