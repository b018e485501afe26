"""What the user calls a node of a graph: the module that it comes from, and the line."""

import re
from pathlib import Path

import torch
from torch import fx

__all__ = ["layer_name", "source_line"]

_SELF = re.compile(r"^L\['\w+'\]\.|^L__self___")
"""How torch.compile spells the model in front of a module's name."""
_TORCH = str(Path(torch.__file__).parent)
"""A line in here is torch's, not the user's."""
_FUSE = str(Path(__file__).parent)
"""Nor is one in here."""


def layer_name(node: fx.Node) -> str:
    """The user's name of the module that a node comes from, `layer1.0.conv1`; the node's where there is none."""
    stack = node.meta.get("nn_module_stack") or {}
    names = [path for path, _ in stack.values()]
    last = names[-1] if names else ""
    return _SELF.sub("", last).replace("_modules['", "").replace("']", "") or node.name


def source_line(node: fx.Node) -> str:
    """The user's line behind a node, "model.py:12"; "" where it is not known."""
    lines = (line.strip() for line in (node.meta.get("stack_trace") or "").splitlines())
    trace = [line for line in lines if line.startswith("File ") and _TORCH not in line and _FUSE not in line]
    if not trace:
        return ""
    path, _, rest = trace[-1].removeprefix('File "').partition('", line ')
    return f"{path.rsplit('/', 1)[-1]}:{rest.partition(',')[0]}"
