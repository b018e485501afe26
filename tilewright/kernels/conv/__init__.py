"""Convolution, channels last, with its epilogue."""
