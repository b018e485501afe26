"""Times our operator against the kernels that Inductor would run instead, on the current GPU, while a model is compiled.

Inductor's side is the vendor's library without an epilogue. If there is an epilogue, one pass over the library's result is
added, because Inductor's fused pointwise kernel must at least read and write this result. Inductor may be able to compute the
epilogue in a kernel that it launches anyway, such as a norm after a residual. Then this pass costs nothing, and is not added.
Our side consists of all implementations that accept the call, with their default configs.

All candidates are timed in turns, in CUDA graphs, on random numbers with the shapes and strides of the call. Weights come from
memory, as in a real model. A process times each distinct call once.

Not here: configs other than the defaults; those come from the tuning database.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.asm.compile import CompileFailed, compile_only, stand_in
from tilewright.hw.device import Device, device_of
from tilewright.op import Choice, Impl, Op, on_card, scope
from tilewright.tune.measure import Stopwatch

__all__ = ["Race", "race"]

_EPILOGUE = {"linear": (3, 4), "conv": (4, 3, 2)}
"""Op -> positions of the arguments that Inductor applies in a pass after the library. cuBLAS adds a bias itself; after cuDNN, a
bias needs this pass too."""
_ROUNDS = 9
_JOBS = 8
"""Number of threads that compile; each mostly waits for ptxas."""
_COLD_BYTES = 120_000_000
"""Total bytes of the copies of a weight, which successive launches use in turn, so that no launch finds its weight in an L2 of
50 MB."""
_SETS = 12
_LEAD = 0.97
"""Our operator is used if its time is at most this share of the library's: timings of one kernel differ by some per cent."""


class Race(NamedTuple):
    """The times of a call in microseconds."""

    ours: float
    theirs: float
    choice: Choice | None = None
    """Our fastest implementation."""

    @property
    def won(self) -> bool:
        """Whether our operator is faster."""
        return self.ours <= _LEAD * self.theirs

    def __str__(self) -> str:
        return f"{self.ours:.1f} us; the vendor's library with the calls after it takes {self.theirs:.1f} us"


_KNOWN: dict[Any, Race | None] = {}


def race(op: Op, choice: Choice, args: tuple[Any, ...], *, free: bool = False) -> Race | None:
    """Time a call.

    Args:
        op: linear, conv or attention.
        choice: the implementation and config that the op would launch without tuning.
        args: arguments of the call. Of tensors, only shape, strides, dtype and device are used, so they may be fake tensors. No
            fake mode may be active.
        free: whether Inductor could compute the epilogue in a kernel that it launches anyway.

    Returns:
        None if nothing can be timed: no GPU, a graph is being captured, or the vendor's library does not accept the call.
    """
    x = args[0]
    if x.device.type != "cuda" or not torch.cuda.is_available() or torch.cuda.is_current_stream_capturing():
        return None
    key = (op.name, choice.impl.name, str(choice.config), free, scope(), str(x.device), *(_summary(a) for a in args))
    if key not in _KNOWN:
        with torch.no_grad(), torch.cuda.device(x.device):
            _KNOWN[key] = _timed(op, choice, args, free)
    return _KNOWN[key]


def _summary(value: Any) -> Any:
    return (tuple(value.shape), value.stride(), value.dtype) if isinstance(value, Tensor) else str(value)


def _entrants(op: Op, device: Device, problem: Any, choice: Choice) -> list[Choice]:
    """The choices to time: the untuned choice first, then the default config of every other implementation.

    Not included: the vendor's library, and implementations that are always slower than another one.
    """
    allowed = [impl for impl in op.impls if impl.refusal(device, problem, scope()) is None]
    names = {impl.name for impl in allowed}
    portable = {"triton", "triton_tma"} if "sm90" in names and op.name != "attention" else set[str]()
    left_out = {"invariant", choice.impl.name} | portable
    found = [] if choice.impl.library else [choice]
    return found + [Choice(i, i.space.default(device, problem)) for i in allowed if not i.library and i.name not in left_out]


def _compiled(entrants: list[Choice], device: Device, args: list[Any]) -> None:
    """Compile all entrants in parallel, into Triton's cache. Failures are ignored here; the first launch reports them."""
    with suppress(CompileFailed), on_card(device), compile_only(device.arch, _JOBS):
        meta = [stand_in(a) for a in args]
        for entrant in entrants:
            if entrant.impl.space.axes:
                entrant.impl.launch(entrant.config, *meta)


def _launching(impl: Impl, config: Any, sets: list[list[Any]], passes: bool = False) -> Callable[[int], Any]:
    def call(i: int) -> Any:
        y = impl.launch(config, *sets[i])
        return y.relu_() if passes else y

    return call


def _timed(op: Op, choice: Choice, args: tuple[Any, ...], free: bool) -> Race | None:
    device = device_of(args[0].device.index or 0)
    # A separate generator, so that the random numbers of the user's program do not change.
    generator = torch.Generator(args[0].device).manual_seed(0)
    real = [_drawn(a, generator) if isinstance(a, Tensor) else a for a in args]
    plain, follows = {}, False
    for at in _EPILOGUE.get(op.name, ()):
        follows |= isinstance(real[at], Tensor) or real[at] not in (None, "none")
        plain[at] = "none" if isinstance(real[at], str) else None
    bare = [plain.get(i, a) for i, a in enumerate(real)]
    vendor = next((impl for impl in op.impls if impl.library), None)
    if vendor is None or vendor.refusal(device, problem := op.problem(*bare)) is not None:
        return None
    entrants = _entrants(op, device, op.problem(*real), choice)
    if not entrants:
        return None
    _compiled(entrants, device, real)
    count = max(1, min(_SETS, _COLD_BYTES // max(1, real[1].nbytes))) if op.name in _EPILOGUE else 1
    weights = [real[1], *(real[1].clone(memory_format=torch.preserve_format) for _ in range(count - 1))]
    sets = [[real[0], w, *real[2:]] for w in weights]
    theirs = [[bare[0], w, *bare[2:]] for w in weights]
    calls = [_launching(vendor, vendor.space.default(device, problem), theirs, follows and not free)]
    calls += [_launching(entrant.impl, entrant.config, sets) for entrant in entrants]
    first, *others = [t.us for t in Stopwatch().in_turns(calls, count, rounds=_ROUNDS)]
    best = min(range(len(others)), key=lambda i: others[i])
    return Race(others[best], first, entrants[best])


def _drawn(t: Tensor, generator: torch.Generator) -> Tensor:
    made = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
    # Fill the memory instead of the tensor: in an expanded tensor, elements share memory, and it cannot be written to.
    made.as_strided((made.untyped_storage().nbytes() // made.itemsize,), (1,)).normal_(generator=generator)
    return made
