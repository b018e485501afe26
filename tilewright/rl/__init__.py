"""Reinforcement learning of language models: tasks and rewards, sampling, losses, and the training loop.

This module imports nothing: the process that computes a reward needs no tensors.
"""
