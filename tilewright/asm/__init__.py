"""Inspecting kernels without a GPU: compile them for any card, read the result, and compare it with stored results."""
