"""Reinforcement learning: batches of samples, advantages, losses, rewards and environments."""

from tilewright.rl.batch import Batch, Sample, Totals, pack, split
from tilewright.rl.losses import ALGORITHMS, Algorithm

__all__ = ["ALGORITHMS", "Algorithm", "Batch", "Sample", "Totals", "pack", "split"]
