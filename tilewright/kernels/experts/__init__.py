"""Mixture-of-experts kernels other than products: routing, sorting rows by expert, moving rows, combining results."""
