"""An operator's launch against what Inductor would run in its place, on the GPU at hand, while a model is compiled.

What Inductor does is stood for by the vendor's library without our epilogue, and where anything follows by one pass over its
result, which is what its fused pointwise kernel reads and writes at least. Where Inductor would put what follows into a kernel
that it launches anyway, as a norm behind a residual, that pass costs it nothing. Ours are all implementations that take the
call, with their default configs. They are timed in turns, in CUDA graphs, on random numbers of the call's shapes and strides,
weights taken from memory in rotation as in a model; once for each distinct call in a process.

Not here: configs beside the defaults, which are the tuning database's.
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
"""Op -> where its arguments have what Inductor adds behind the library: cuBLAS adds a bias itself, for cuDNN that is a pass."""
_ROUNDS = 9
_JOBS = 8
"""Compiling threads: each is a ptxas most of its time."""
_COLD_BYTES = 120_000_000
"""Of weights in a rotation, so that no launch finds its own in an L2 of 50 MB."""
_SETS = 12
_LEAD = 0.97
"""What ours must take of the library's time: two timings of one kernel differ by some per cent."""


class Race(NamedTuple):
    """Microseconds of a call."""

    ours: float
    theirs: float
    choice: Choice | None = None
    """Which of ours."""

    @property
    def won(self) -> bool:
        """Whether ours is faster."""
        return self.ours <= _LEAD * self.theirs

    def __str__(self) -> str:
        return f"{self.ours:.1f} us against {self.theirs:.1f} of the vendor's library with what follows"


_KNOWN: dict[Any, Race | None] = {}


def race(op: Op, choice: Choice, args: tuple[Any, ...], *, free: bool = False) -> Race | None:
    """Time a call.

    Args:
        op: linear, conv, attention.
        choice: what it would launch untuned.
        args: of the call; tensors are examples of shape, stride, dtype and device, fake ones too. No fake mode may be on.
        free: whether Inductor computes what follows in a kernel that it launches anyway.

    Returns:
        None where nothing can be timed: no GPU, a graph is being captured, or the vendor's library does not take the call.
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
    """What may run the call, the untuned choice first; without the vendor's, and without what another one beats anywhere."""
    allowed = [impl for impl in op.impls if impl.refusal(device, problem, scope()) is None]
    names = {impl.name for impl in allowed}
    portable = {"triton", "triton_tma"} if "sm90" in names and op.name != "attention" else set[str]()
    left_out = {"invariant", choice.impl.name} | portable
    found = [] if choice.impl.library else [choice]
    return found + [Choice(i, i.space.default(device, problem)) for i in allowed if not i.library and i.name not in left_out]


def _compiled(entrants: list[Choice], device: Device, args: list[Any]) -> None:
    """Compile side by side into Triton's cache; what fails there says so at its first launch."""
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
    # A generator of its own: the program's random numbers stay what they would have been.
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
    # The memory, not the tensor: what is expanded has several elements in one place, and cannot be written.
    made.as_strided((made.untyped_storage().nbytes() // made.itemsize,), (1,)).normal_(generator=generator)
    return made
