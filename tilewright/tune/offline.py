"""Compiles candidates on all cores, without a GPU and with a time limit, into the cache that the measuring process reads."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tilewright.asm.compile import CompileFailed, record
from tilewright.asm.facts import facts
from tilewright.asm.pool import run_limited
from tilewright.hw.device import Device

__all__ = ["compile_all"]

Facts = dict[str, Any]


def compile_all(
    candidates: Sequence[tuple[Any, Mapping[str, Any], Sequence[Any]]], device: Device, *, workers: int, limit_s: float
) -> Iterator[tuple[int, Facts | str]]:
    """(index, compilation result or error message) of every candidate, in the order in which they finish.

    The result has, over its kernels, the most "registers", "spill_bytes" and "shared_bytes", the fewest "blocks_per_sm", and
    the "warps" of the first kernel. It is {} if the candidate launches no kernel.

    Args:
        candidates: (a `tilewright.op.Impl`, config, arguments); only shape, strides and dtype of tensors are used.
        device: the card to compile for.
        workers: number of forked processes; this process must not hold a CUDA context that a compiler could use.
        limit_s: seconds for one candidate.

    Raises:
        RuntimeError: Triton kernels are interpreted in this process.
    """

    def work(place: int) -> Facts | str:
        impl, config, args = candidates[place]
        try:
            binaries = record(impl, config, args, device.arch)
        except CompileFailed as error:
            return str(error)
        found = [facts(binary) for binary in binaries]
        for f in found:
            if f.shared_bytes > device.smem_bytes:
                return f"{f.kernel} needs {f.shared_bytes} bytes of shared memory, {device.name} has {device.smem_bytes}"
            if not f.blocks_per_sm:
                return f"{f.kernel} does not fit on an SM: {f.registers} registers, {f.warps} warps, {f.shared_bytes} bytes"
        if not found:
            return {}
        return {
            "warps": found[0].warps,
            "registers": max(f.registers for f in found),
            "spill_bytes": max(f.spill_bytes for f in found),
            "shared_bytes": max(f.shared_bytes for f in found),
            "blocks_per_sm": min(f.blocks_per_sm for f in found),
        }

    for outcome in run_limited(work, len(candidates), workers=workers, limit_s=limit_s):
        yield outcome.task, f"compiling {outcome.error}" if outcome.error is not None else outcome.value
