"""Optimizers that update all parameters in one launch. Clipping and the check for NaN run on the device; the host does not
wait."""

from tilewright.train.optim.adamw import AdamW
from tilewright.train.optim.adamw_8bit import AdamW8bit
from tilewright.train.optim.flat import Optimizer, Step
from tilewright.train.optim.momentum import Momentum
from tilewright.train.optim.muon import Muon
from tilewright.train.optim.sgd import SGD

__all__ = ["SGD", "AdamW", "AdamW8bit", "Momentum", "Muon", "Optimizer", "Step"]
