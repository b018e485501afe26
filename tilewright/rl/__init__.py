"""Reinforcement learning of language models: tasks and rewards, sampling, losses, and the training loop.

This module imports nothing, because the processes that compute rewards do not need torch.
"""
