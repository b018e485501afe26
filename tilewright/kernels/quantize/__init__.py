"""Quantisers of activations, alone and behind the operator that comes before them."""
