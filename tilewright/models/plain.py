"""What the models that are plain compositions of `tilewright.nn` share: fresh, trainable parameters.

Layers that a checkpoint fills are made uninitialised and ask for no gradient (`tilewright.nn`). A model that is trained, or
that loads a state dict with `load_state_dict`, wants neither.
"""

from torch import nn

from tilewright.nn.embedding import Embedding
from tilewright.nn.linear import Linear

__all__ = ["trainable"]


def trainable(model: nn.Module) -> None:
    """Initialise the linear layers and tables of a model as torch.nn does, and let every parameter have a gradient."""
    for module in model.modules():
        if isinstance(module, Linear | Embedding):
            module.reset_parameters()
    model.requires_grad_()
