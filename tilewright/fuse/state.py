"""State that a model keeps between calls, in attributes and buffers of its modules.

A graph keeps no such state. This is harmless if the state is a table that the first call fills. It is not if it is a hidden
state. To distinguish the two cases, the model is called on other values, and then on the example inputs again
(`judge.right_outputs`).
"""

import copy
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tilewright.fuse.structure import flatten, rebuild

__all__ = ["attributes", "changed", "copied_model", "other_values", "with_own_state"]

_OF_ANY_MODULE = frozenset(vars(nn.Module()))
_DEPTH = 4
"""How many levels of containers and objects are searched for values."""


def with_own_state(model: nn.Module) -> nn.Module:
    """A copy that shares the parameters and optimised parts, but has its own buffers and other attributes.

    Raises:
        ValueError: an attribute cannot be copied, such as a lock.
    """
    shared = [*model.parameters(), *(m for m in model.modules() if getattr(m, "shared_by_copies", False))]
    return copied_model(model, {id(each): each for each in shared})


def copied_model(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """`copy.deepcopy(model, memo)`. Raises ValueError if an attribute cannot be copied, such as a lock."""
    try:
        return copy.deepcopy(model, memo)
    except (TypeError, RuntimeError) as error:
        raise ValueError(
            f"optimize: {type(model).__name__} cannot be copied: {str(error).splitlines()[0]}. optimize works on a copy, so no "
            "module may have an attribute that cannot be copied, such as a lock, a generator or a file"
        ) from error


class _Leaf(NamedTuple):
    value: Any
    version: int


def attributes(model: nn.Module) -> dict[str, list[_Leaf]]:
    """The values in the attributes and buffers of all modules, by path."""
    found = dict[str, list[_Leaf]]()
    for path, module in model.named_modules():
        for name, value in (*vars(module).items(), *module._buffers.items()):
            if name not in _OF_ANY_MODULE:
                found[f"{path}.{name}" if path else name] = list(_leaves(value, _DEPTH))
    return found


def _leaves(value: Any, depth: int) -> Iterator[_Leaf]:
    inside: Any = None
    if isinstance(value, Tensor):
        yield _Leaf(value, 0 if value.is_inference() else value._version)
        return
    if isinstance(value, Mapping):
        inside = value.values()
    elif isinstance(value, Sequence | Set | deque) and not isinstance(value, str | bytes):
        inside = value
    elif hasattr(value, "__dict__") and not isinstance(value, nn.Module | type) and not callable(value):
        inside = vars(value).values()
    if inside is None or depth == 0:
        yield _Leaf(value, 0)
        return
    yield _Leaf(len(inside), 0)
    for item in list(inside):
        yield from _leaves(item, depth - 1)


def changed(before: Mapping[str, list[_Leaf]], after: Mapping[str, list[_Leaf]]) -> list[str]:
    """Paths of attributes that are new or have changed values."""
    return [path for path, leaves in after.items() if not _same(before.get(path), leaves)]


def _same(before: list[_Leaf] | None, after: list[_Leaf]) -> bool:
    if before is None or len(before) != len(after):
        return False
    return all(
        b.version == a.version and (b.value is a.value or (isinstance(a.value, int | float | str) and b.value == a.value))
        for b, a in zip(before, after, strict=True)
    )


def other_values(value: Any) -> Any:
    """The same arguments with other values: floats are halved and shifted, integers and flags are reordered."""
    tensors, structure = flatten(value)
    return rebuild(
        structure, [t * 0.5 + 0.25 if t.is_floating_point() else torch.flip(t, (0,)) if t.dim() else t for t in tensors]
    )
