"""The user's names for a node of a graph: the module that it comes from, and the line of source code."""

import re
from pathlib import Path

import torch
from torch import fx

__all__ = ["layer_name", "source_line"]

_SELF = re.compile(r"^L\['\w+'\]\.|^L__self___")
"""torch.compile's prefix for the model in the names of its modules."""
_TORCH = str(Path(torch.__file__).parent)
"""Lines in this folder are torch's, not the user's."""
_FUSE = str(Path(__file__).parent)
"""Lines in this folder are ours."""


def layer_name(node: fx.Node) -> str:
    """The user's name of the module that a node comes from, such as `layer1.0.conv1`. Without a module: the node's name."""
    stack = node.meta.get("nn_module_stack") or {}
    names = [path for path, _ in stack.values()]
    last = names[-1] if names else ""
    return _SELF.sub("", last).replace("_modules['", "").replace("']", "") or node.name


def source_line(node: fx.Node) -> str:
    """The user's source line for a node, such as "model.py:12"; "" if it is unknown."""
    lines = (line.strip() for line in (node.meta.get("stack_trace") or "").splitlines())
    trace = [line for line in lines if line.startswith("File ") and _TORCH not in line and _FUSE not in line]
    if not trace:
        return ""
    path, _, rest = trace[-1].removeprefix('File "').partition('", line ')
    return f"{path.rsplit('/', 1)[-1]}:{rest.partition(',')[0]}"
