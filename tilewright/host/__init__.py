"""Ordinary models in processes of their own: batched, checked, replaced when they break."""
