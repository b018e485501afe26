"""Attention of whole sequences, with and without a bias."""
