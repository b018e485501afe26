"""What Triton would compile for a launch, without compiling it: the kernel's name and how each argument is specialised."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from tilewright.asm.compile import _Offline, stand_in
from tilewright.op import Impl

__all__ = ["Signature", "padded", "signatures"]


class Signature(NamedTuple):
    """One launch: two with equal signatures share a binary."""

    kernel: str
    constants: tuple[tuple[str, str], ...]
    """The `constexpr` arguments and the compile options, by name."""
    given: tuple[tuple[str, str], ...]
    """The run-time arguments by name: type, and "1" or "D" where Triton made a binary for that value or its alignment."""


def signatures(impl: Impl, config: Any, args: Sequence[Any], arch: int) -> list[Signature]:
    """The launches of `impl.launch(config, *args)` on a card of this architecture; `args` may be meta tensors."""
    with _noted(arch) as found:
        impl.launch(config, *(stand_in(a) for a in args))
    return found


def padded(x: Tensor, inner: int, outer: int) -> Tensor:
    """A meta tensor like x, a view of a larger one: `inner` more elements in its innermost dim, `outer` more in the next."""
    if x.dim() < 2 or not x.numel() or (inner, outer) == (0, 0):
        return x
    strides, step = [0] * x.dim(), 1
    for place, dim in enumerate(sorted(range(x.dim()), key=lambda d: (x.stride(d), -d))):
        strides[dim] = step
        step *= x.shape[dim] + (inner, outer, *[0] * x.dim())[place]
    return torch.empty(step, dtype=x.dtype, device="meta").as_strided(x.shape, strides)


class _Kernel:
    """Stands for what a launch gives back: launchers that hold it for later calls look at some of it."""

    def __getattr__(self, name: str) -> Any:
        return _Kernel()


@contextmanager
def _noted(arch: int) -> Iterator[list[Signature]]:
    found: list[Signature] = []
    active, run = driver._active, JITFunction.run

    def note(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> _Kernel:
        # As Triton's own `run` begins.
        kwargs |= {"debug": False, "instrumentation_mode": ""}
        bound, kinds, options = self.device_caches["signatures"][-1](*args, **kwargs)
        constants, given = [], []
        for parameter, value, (kind, special) in zip(self.params, bound.values(), kinds):
            if parameter.is_constexpr:
                constants.append((parameter.name, repr(value)))
            else:
                given.append((parameter.name, f"{kind} {special or ''}".strip()))
        chosen = sorted((name, repr(value)) for name, value in options.items() if name not in bound)
        found.append(Signature(self.fn.__qualname__, (*constants, *chosen), tuple(given)))
        return _Kernel()

    driver.set_active(_Offline(arch))  # pyright: ignore[reportArgumentType]
    JITFunction.run = note
    try:
        yield found
    finally:
        JITFunction.run = run
        driver.set_active(active)  # pyright: ignore[reportArgumentType]
