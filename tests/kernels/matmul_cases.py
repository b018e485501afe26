"""Calls of `linear` that walk the implementations' whole spaces: for the tests, and for whoever measures."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from tilewright.hw.device import Device
from tilewright.kernels.gemm.linear import linear_op
from tilewright.kernels.gemm.problem import ACTIVATIONS
from tilewright.op import Impl, Inputs
from tilewright.tune.space import Config

__all__ = ["Case", "arguments", "every_config"]


class Case(NamedTuple):
    """One config of one implementation, with arguments that it must take. Ragged in M, N and K wherever that is allowed."""

    impl: Impl
    config: Config
    args: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.impl.name}-{self.args[0].shape[0]}rows-" + "-".join(f"{k}={v}" for k, v in self.config.items())


def arguments(
    inputs: Inputs,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    activation: str = "none",
    bias: bool = True,
    residual: bool = True,
) -> tuple[Any, ...]:
    """Arguments of `linear_op`, scaled so that the product has a standard deviation of 1."""
    width = n // 2 if ACTIVATIONS[activation][1] else n
    return (
        inputs.randn(m, k, dtype=dtype),
        inputs.randn(n, k, dtype=dtype, scale=k**-0.5),
        inputs.randn(n, dtype=dtype) if bias else None,
        activation,
        inputs.randn(m, width, dtype=dtype) if residual else None,
    )


# Implementation -> problems that together reach every config worth having: (m, n, k, dtype, activation).
_LARGE = {
    "gemv": (
        (1, 1001, 4103, torch.bfloat16, "gelu"),
        (1, 1002, 4104, torch.float16, "silu_mul"),
        (1, 301, 4112, torch.float16, "none"),
    ),
    "skinny": ((5, 1002, 2056, torch.bfloat16, "silu_mul"), (11, 1001, 2056, torch.float16, "none")),
    "uneven": ((5, 1002, 2049, torch.bfloat16, "gelu"), (60, 1001, 2050, torch.float16, "none")),
    "uneven_tma": ((60, 1001, 2049, torch.bfloat16, "gelu"), (200, 520, 2050, torch.float16, "none")),
    "sm90": (
        (300, 1002, 2056, torch.bfloat16, "silu_mul"),
        (600, 1000, 8200, torch.float16, "none"),
        (2049, 1001, 777, torch.bfloat16, "gelu"),
        (40, 520, 4104, torch.bfloat16, "gelu_tanh"),
    ),
    "triton_tma": ((300, 1002, 520, torch.bfloat16, "silu_mul"), (300, 1001, 520, torch.float16, "none")),
    "triton": (
        (70, 330, 2056, torch.bfloat16, "gelu_mul"),
        (300, 8001, 520, torch.float16, "none"),
        (300, 4001, 520, torch.float32, "silu"),
    ),
}
# The interpreter wants few programs.
_SMALL = {
    "gemv": ((1, 12, 528, torch.bfloat16, "silu_mul"), (1, 21, 521, torch.float16, "gelu")),
    "skinny": ((3, 22, 520, torch.bfloat16, "silu_mul"), (11, 22, 520, torch.float16, "none")),
    "uneven": ((5, 22, 521, torch.bfloat16, "gelu"), (18, 9, 266, torch.float16, "none")),
    "uneven_tma": ((18, 22, 521, torch.bfloat16, "gelu"), (40, 9, 266, torch.float16, "none")),
    "triton_tma": ((70, 70, 136, torch.bfloat16, "gelu_mul"),),
    "triton": ((40, 70, 520, torch.float16, "silu_mul"),),
}
_SAMPLE = 6


def every_config(device: Device) -> Iterator[Case]:
    """Every config on a GPU; an even sample of each space under the interpreter; nothing where neither is."""
    interpreted = device.kind == "interpret"
    if not device.runs_triton:
        return
    inputs = Inputs("cpu" if interpreted else "cuda")
    for impl in linear_op.impls:
        for m, n, k, dtype, activation in (_SMALL if interpreted else _LARGE).get(impl.name, ()):
            args = arguments(inputs, m, n, k, dtype, activation)
            problem = linear_op.problem(*args)
            if impl.refusal(device, problem):
                continue
            configs = list(impl.space.configs(device, problem))
            for config in configs[:: -(-len(configs) // _SAMPLE) if interpreted else 1]:
                yield Case(impl, config, args)
