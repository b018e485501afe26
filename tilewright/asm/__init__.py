"""Judging kernels without a GPU: compile them for any card, read what came out, hold it against what came out before."""
