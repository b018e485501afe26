"""Capability flags: what the installed Triton and Gluon support, for kernels that need features of newer versions.

A flag is determined from the installed package (whether a name exists), never from a version number, because builds differ.
Kernels test a flag where they are defined, so that a version without the feature can still import them.
"""

import importlib
import inspect
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

__all__ = ["Features", "features"]


@dataclass(frozen=True, kw_only=True)
class Features:
    """Features of Gluon on sm_90 and newer, unless stated otherwise."""

    gluon: bool
    """`triton.experimental.gluon` imports."""
    bank_conflicts: bool
    """`gl.bank_conflicts`: conflicts between a register layout and a shared one, at compile time."""
    clusters: bool
    """Blocks of a cluster can wait for each other."""
    tma_multicast: bool
    """A TMA load can deliver one tile to several blocks of a cluster."""
    tma_im2col: bool
    """A TMA load can gather convolution patches."""
    tma_reduce: bool
    """A TMA store can add to the values in memory."""
    async_load_names: bool
    """TMA copies are called `async_load` and `async_store`; before, `async_copy_global_to_shared` and the reverse."""
    cache_policies: bool
    """TMA loads take a cache policy."""


@cache
def features() -> Features:
    """The features of the installed version. Imports Gluon."""
    language = _module("triton.experimental.gluon.language")
    tma = _module("triton.experimental.gluon.language.nvidia.hopper.tma")
    hopper = _module("triton.experimental.gluon.language.nvidia.hopper")
    load = getattr(tma, "async_load", None) or getattr(tma, "async_copy_global_to_shared", None)
    takes = _parameters(load)
    return Features(
        gluon=language is not None,
        bank_conflicts=hasattr(language, "bank_conflicts"),
        clusters=hasattr(hopper, "cluster"),
        tma_multicast="multicast" in takes,
        tma_im2col=hasattr(tma, "async_load_im2col") or hasattr(tma, "async_copy_global_to_shared_im2col"),
        tma_reduce=any(name.startswith("async_atomic") for name in dir(tma)),
        async_load_names=hasattr(tma, "async_load"),
        cache_policies=any("cache" in name or "evict" in name for name in takes),
    )


def _module(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _parameters(function: Any) -> tuple[str, ...]:
    """Names of a builtin's parameters, read from the function that Gluon wraps."""
    return tuple(inspect.signature(inspect.unwrap(function)).parameters) if function is not None else ()
