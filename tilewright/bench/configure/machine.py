"""The facts on which a prediction depends: from a model's folder, and about this machine."""

import time
from collections.abc import Callable

import torch

from tilewright.bench.configure.predict import Facts, Machine
from tilewright.hw.ceilings import ceilings
from tilewright.hw.device import cuda_count, default_device, device_of, memory_bytes
from tilewright.models import kv_bytes_per_token, load_config, resolve, weight_bytes

__all__ = ["facts_of", "this_machine"]

_REACHED = 0.6
"""Share of a card's ceilings that steps of a model are assumed to reach."""
_CUDA_STEP_S, _CPU_STEP_S = 1.5e-3, 3e-3
_CPU_CACHE_BYTES = 1 << 30
"""Bytes that the engine uses for its cache on a CPU."""


def facts_of(model: str) -> Facts:
    """The facts of a model, given by its name or folder. Raises ModelError if it cannot be found."""
    config = load_config(resolve(model))
    dtype = config.dtype if default_device().type == "cuda" else torch.float32
    return Facts(
        parameters=weight_bytes(config, dtype) // dtype.itemsize,
        dtype_bytes=dtype.itemsize,
        kv_elements=kv_bytes_per_token(config, dtype) // dtype.itemsize,
        max_model_len=config.max_position_embeddings,
    )


def this_machine(weights_bytes: int) -> Machine:
    """This machine: its cards by their ceilings, or without a card its processor, by a short measurement."""
    count = cuda_count()
    if count:
        card = device_of(0)
        found = ceilings(card)
        unit = "bf16" if "bf16" in found.flops else next(iter(found.flops))
        memory = int(0.9 * memory_bytes(torch.device("cuda", 0))) - (2 << 30)
        fast = tuple(name for name in ("fp8", "int8") if name in found.flops)
        return Machine(
            devices=count,
            flops_per_s=_REACHED * found.flops[unit],
            bytes_per_s=_REACHED * found.copy,
            memory_bytes=memory,
            step_s=_CUDA_STEP_S,
            fast_formats=fast,
        )
    flops, copied = _processor()
    return Machine(
        devices=1,
        flops_per_s=_REACHED * flops,
        bytes_per_s=_REACHED * copied,
        memory_bytes=weights_bytes + _CPU_CACHE_BYTES,
        most_seqs=64,
        most_tokens=256,
        step_s=_CPU_STEP_S,
    )


def _processor() -> tuple[float, float]:
    """(FLOP/s of a float32 product, bytes/s of a copy), the best of a few runs."""
    a, b = torch.randn(512, 512), torch.randn(1 << 23)
    product = min(_seconds(lambda: a @ a) for _ in range(5))
    copied = min(_seconds(b.clone) for _ in range(5))
    return 2 * 512**3 / product, 2 * b.nbytes / copied


def _seconds(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s
