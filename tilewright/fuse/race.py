"""An operator's launch against what Inductor would run in its place, on the GPU at hand, while a model is compiled.

What Inductor does is stood for by the vendor's library without our epilogue, and one pass over its result where anything
follows, which is what its fused pointwise kernel reads and writes at least. Both are timed in turns, in CUDA graphs, on random
numbers of the call's shapes and strides; once for each distinct call in a process.

Not here: the choice between our own implementations and configs, which is the tuning database's.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewright.hw.device import device_of
from tilewright.op import Choice, Op
from tilewright.tune.measure import Stopwatch

__all__ = ["Race", "race"]

_EPILOGUE = {"linear": (3, 4), "conv": (4, 3)}
"""Op -> where its arguments have the activation and the residual."""
_ROUNDS = 7


class Race(NamedTuple):
    """Microseconds of a call."""

    ours: float
    theirs: float

    @property
    def won(self) -> bool:
        """Whether ours is no slower."""
        return self.ours <= self.theirs

    def __str__(self) -> str:
        return f"{self.ours:.1f} us against {self.theirs:.1f} of the vendor's library with a pass for what follows"


_KNOWN: dict[Any, Race | None] = {}


def race(op: Op, choice: Choice, args: tuple[Any, ...]) -> Race | None:
    """Time a call.

    Args:
        op: linear, conv, attention.
        choice: what it would launch.
        args: of the call; tensors are examples of shape, stride, dtype and device, fake ones too. No fake mode may be on.

    Returns:
        None where nothing can be timed: no GPU, a graph is being captured, or the vendor's library does not take the call.
    """
    x = args[0]
    if x.device.type != "cuda" or not torch.cuda.is_available() or torch.cuda.is_current_stream_capturing():
        return None
    key = (op.name, choice.impl.name, str(choice.config), str(x.device), *(_summary(a) for a in args))
    if key not in _KNOWN:
        with torch.no_grad(), torch.cuda.device(x.device):
            _KNOWN[key] = _timed(op, choice, args)
    return _KNOWN[key]


def _summary(value: Any) -> Any:
    return (tuple(value.shape), value.stride(), value.dtype) if isinstance(value, Tensor) else str(value)


def _timed(op: Op, choice: Choice, args: tuple[Any, ...]) -> Race | None:
    device = device_of(args[0].device.index or 0)
    # A generator of its own: the program's random numbers stay what they would have been.
    generator = torch.Generator(args[0].device).manual_seed(0)
    real = [_drawn(a, generator) if isinstance(a, Tensor) else a for a in args]
    bare, follows = list(real), False
    for at in _EPILOGUE.get(op.name, ()):
        follows |= isinstance(bare[at], Tensor) or bare[at] not in (None, "none")
        bare[at] = "none" if isinstance(bare[at], str) else None
    problem = op.problem(*bare)
    vendor = next((impl for impl in op.impls if impl.name == "vendor"), None)
    if vendor is None or vendor.refusal(device, problem) is not None:
        return None
    config = vendor.space.default(device, problem)

    def ours(i: int) -> Any:
        return choice.impl.launch(choice.config, *real)

    def theirs(i: int) -> Any:
        y = vendor.launch(config, *bare)
        return y.relu_() if follows else y

    times = Stopwatch().in_turns([ours, theirs], 1, rounds=_ROUNDS)
    return Race(times[0].us, times[1].us)


def _drawn(t: Tensor, generator: torch.Generator) -> Tensor:
    made = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
    return made.normal_(generator=generator)
