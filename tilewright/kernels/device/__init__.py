"""Triton functions that kernels in several folders call. No ops."""
