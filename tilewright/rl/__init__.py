"""Reinforcement learning: `batch`, `advantages`, `losses`, `stats` and `environments`.

Nothing is imported here: a reward's worker process needs no tensors.
"""
