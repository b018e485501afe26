"""Custom operators whose first argument is a measured implementation and config. torch's compiler treats them as one call.

`chosen(op)` returns torch.ops.tilewright_chosen.<name>. Its arguments are the choice as text (`spelled`), followed by the op's
own arguments. Without such operators, a measured config would have to be stored in the tuning database, to which a compilation
must not write.
"""

import json
from functools import cache
from typing import Any

import torch

from tilewright.op import Choice, Impl, Op
from tilewright.tune.space import Config

__all__ = ["chosen", "spelled"]

_LIBRARY = torch.library.Library("tilewright_chosen", "DEF")


def spelled(choice: Choice) -> str:
    """The implementation and the config as text without spaces."""
    return json.dumps([choice.impl.name, choice.config], sort_keys=True)


def chosen(op: Op) -> Any:
    """Define a variant of an op that accepts a choice before its other arguments.

    Call this function once per op, when a module is imported: code from Inductor's cache calls the variant by its name.
    """

    @cache
    def read(words: str) -> tuple[Impl, Config]:
        name, config = json.loads(words)
        return next(impl for impl in op.impls if impl.name == name), config

    def launch(choice: str, *args: Any) -> Any:
        impl, config = read(choice)
        return impl.launch(config, *args)

    schema = torch.library.infer_schema(op.reference, mutates_args=op.mutates)
    _LIBRARY.define(f"{op.name}(str choice, {schema.removeprefix('(')}")
    _LIBRARY.impl(op.name, launch, "CUDA")
    _LIBRARY.impl(op.name, lambda choice, *args: op.reference(*args), "CPU")
    fake = op.fake or op.reference
    torch.library.register_fake(f"tilewright_chosen::{op.name}", lambda choice, *args: fake(*args), lib=_LIBRARY)
    return getattr(torch.ops.tilewright_chosen, op.name).default
