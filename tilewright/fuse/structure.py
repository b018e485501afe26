"""Converts arguments and results of a model to a flat list of tensors and a structure, and back.

    tensors, structure = flatten((args, kwargs))
    args, kwargs = rebuild(structure, tensors)

pytree flattens tuples, lists, dicts, and all other classes that are registered with it (including outputs of Hugging Face's
models). Other objects with data in attributes, such as dataclasses and Hugging Face's caches, are flattened by their
attributes. They are rebuilt as the same class, without calling the constructor. All other values that are not tensors are
constants, and part of the structure. Structures can be compared and hashed if their constants can.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from itertools import islice
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

__all__ = ["Constant", "Opened", "Structure", "arguments", "count", "flatten", "opened", "rebuild"]


class Constant(NamedTuple):
    """A leaf that is not a tensor. Its type is compared too: 1, 1.0 and True are three different constants."""

    kind: type
    value: Any


class Structure(NamedTuple):
    """The structure of a value: everything except its tensors."""

    spec: pytree.TreeSpec
    """pytree's structure of the leaves below."""
    leaves: tuple["Constant | Opened | None", ...]
    """The leaves of `spec` in order; None for a tensor."""


class Opened(NamedTuple):
    """A leaf of pytree that was flattened by its attributes."""

    kind: type
    names: tuple[str, ...]
    inside: Structure
    """The structure of the list of its attribute values."""


_WHOLE = (nn.Module, torch.dtype, torch.device, torch.Size, Enum, type, ModuleType, str, bytes, int, float, complex)
"""Objects of these types are constants, even if they have attributes."""


def _attributes(leaf: Any) -> dict[str, Any] | None:
    """The attributes by which an object is flattened, by name; None for a constant."""
    if leaf is None or isinstance(leaf, _WHOLE) or callable(leaf):
        return None
    if is_dataclass(leaf):
        return {field.name: getattr(leaf, field.name) for field in fields(leaf) if hasattr(leaf, field.name)}
    return dict(vars(leaf)) if hasattr(leaf, "__dict__") else None


def flatten(value: Any, around: tuple[int, ...] = ()) -> tuple[list[Tensor], Structure]:
    """(the tensors of a value in order, its structure).

    Args:
        value: any value.
        around: ids of the objects that contain the value as an attribute. A reference back to one of them is a constant.
    """
    leaves, spec = pytree.tree_flatten(value)
    tensors, found = list[Tensor](), list[Constant | Opened | None]()
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
            found.append(None)
        elif id(leaf) in around or (state := _attributes(leaf)) is None:
            found.append(Constant(type(leaf), leaf))
        else:
            inner, inside = flatten(list(state.values()), (*around, id(leaf)))
            tensors += inner
            found.append(Opened(type(leaf), tuple(state), inside))
    return tensors, Structure(spec, tuple(found))


def rebuild(structure: Structure, tensors: Iterable[Any]) -> Any:
    """The value with this structure and these tensors.

    Other objects may be passed instead of tensors, unless a class checks the types of its parts, as PackedSequence does.
    """
    return _rebuilt(structure, iter(tensors))


def _rebuilt(structure: Structure, tensors: Iterator[Any]) -> Any:
    leaves = []
    for leaf in structure.leaves:
        if leaf is None:
            leaves.append(next(tensors))
        elif isinstance(leaf, Constant):
            leaves.append(leaf.value)
        else:
            made = leaf.kind.__new__(leaf.kind)  # pyright: ignore[reportCallIssue]
            for name, value in zip(leaf.names, _rebuilt(leaf.inside, tensors), strict=True):
                object.__setattr__(made, name, value)
            leaves.append(made)
    return pytree.tree_unflatten(leaves, structure.spec)


def arguments(structure: Structure) -> list[tuple[int | str, Structure]]:
    """The structure of each argument of a call, by position or name.

    Args:
        structure: the structure of (args, kwargs).
    """
    args, kwargs = structure.spec.children()
    specs = [*enumerate(args.children()), *zip(kwargs.context, kwargs.children(), strict=True)]
    leaves = iter(structure.leaves)
    return [(place, Structure(spec, tuple(islice(leaves, spec.num_leaves)))) for place, spec in specs]


def count(structure: Structure) -> int:
    """The number of tensors in a structure."""
    return sum(leaf is None or (count(leaf.inside) if isinstance(leaf, Opened) else 0) for leaf in structure.leaves)


def _is_mapping(value: Any) -> bool:
    """Whether a value is a mapping whose keys would be missing in pytree's own paths."""
    return isinstance(value, Mapping) and type(value) is not dict


def opened(value: Any) -> Any:
    """The value as plain dicts, lists and tuples, so that pytree can give each leaf a name in a comparison."""

    def each(leaf: Any) -> Any:
        if _is_mapping(leaf):
            return {key: opened(item) for key, item in leaf.items()}
        state = None if isinstance(leaf, Tensor) else _attributes(leaf)
        return leaf if state is None else {name: opened(item) for name, item in state.items()}

    return pytree.tree_map(each, value, is_leaf=_is_mapping)
