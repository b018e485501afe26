"""Softmax and cross-entropy of rows, and their gradients."""
