"""Norms over the channels of a batch: sums, statistics, normalisation and gradients."""
