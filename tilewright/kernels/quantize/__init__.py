"""Quantisers of activations, alone and fused with the operator before them."""
