"""Launches that are made again: the same compiled kernel, grid and numbers on other memory.

A launch through Triton's `kernel[grid](...)` looks at each argument to find out which binary is meant, and a descriptor of the
copy engine is checked and written down as text for that: tens of microseconds of host time for a kernel of forty arguments,
more than a convolution of one image takes. Where a launcher knows that a call differs from an earlier one by its addresses
alone, it keeps a `Prepared` and hands it those. What a launcher has to compare for that, `Held` is asked by: shapes, strides,
dtypes, constants, the card, and which addresses are multiples of 16.

From its second launch on it goes the way of driver_call.py. A held launch keeps no tensor alive: it has offsets into operands.
Launchers make one of every launch and hold those that a card has run: a recording for a card that is not here (asm/compile.py)
goes the same way, and shows what is wrong with it.
"""

from collections.abc import Hashable, Mapping, Sequence
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from triton import knobs
from triton.compiler import CompiledKernel

from tilewright.hw import env
from tilewright.hw.here import away, indirect
from tilewright.kernels.launch.driver_call import BareLaunch, bare_launch
from tilewright.op import scope

__all__ = ["Held", "Prepared", "call_key", "first_launch", "in_place", "launch", "pointer_kind"]


_PLAIN = (Tensor, Parameter)


class _Base:
    """What a descriptor is told its memory is: an address."""

    __slots__ = ("pointer",)

    def __init__(self, pointer: int):
        self.pointer = pointer

    def data_ptr(self) -> int:
        return self.pointer


class Prepared:
    """A launch with places for addresses.

    Args:
        kernel: the jitted function: names the order of its parameters.
        compiled: what launching it gave.
        grid: programs, one to three numbers.
        arguments: those of the launch, by position: tensors, descriptors, numbers, None.
        constants: the rest, by name.
        owners: for each of the first arguments, which operand it points into, or is: a float that is another every time;
            None for what stays.
        operands: addresses of the operands of that launch, and such floats.
    """

    def __init__(
        self, kernel: Any, compiled: CompiledKernel, grid: Sequence[int], arguments: Sequence[Any],
        constants: Mapping[str, Any], owners: Sequence[int | None], operands: Sequence[float],
    ):  # fmt: skip
        rest = [constants[name] for name in kernel.arg_names[len(arguments) :]]
        self._arguments = [*arguments, *rest]
        self._places: list[tuple[int, int, float, Any]] = []
        for i, owner in enumerate(owners):
            value = arguments[i]
            if owner is None or value is None:
                continue
            fields, at = None, value
            if isinstance(value, Tensor):
                at = value.data_ptr()
            elif not isinstance(value, float):
                at = value.base.data_ptr()
                fields = (type(value), {name: field for name, field in vars(value).items() if name != "base"})
            self._places.append((i, owner, at - operands[owner], fields))
            self._arguments[i] = None
        self._compiled, self._grid = compiled, (*grid, 1, 1)[:3]
        self._run: Any = None
        self._bare: BareLaunch | None = None

    def __call__(self, operands: Sequence[float]) -> None:
        """Launch on operands at these addresses."""
        bare, runtime = self._bare, knobs.runtime
        if bare is None or runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:
            self._launch(operands)  # profilers hook into launches
            return
        if not bare.encodes:
            arguments = self._arguments.copy()
            for i, owner, offset, _ in self._places:
                arguments[i] = operands[owner] + offset
            bare(arguments)
            return
        key = tuple(operands)
        if not bare.again(key):
            bare.encode(key, self._on(operands))

    def _on(self, operands: Sequence[float]) -> list[Any]:
        """The launch's arguments on operands at these addresses."""
        arguments = self._arguments.copy()
        for i, owner, offset, fields in self._places:
            at: Any = operands[owner] + offset
            if fields is not None:
                # Its own constructor checks what was checked when the launch was made first.
                described = object.__new__(fields[0])
                described.__dict__.update(fields[1], base=_Base(at))
                at = described
            arguments[i] = at
        return arguments

    def _launch(self, operands: Sequence[float]) -> None:
        """Triton's way; the first time it makes the kernel's handle."""
        arguments = self._on(operands)
        if self._run is None:  # not sooner: a kernel that was only compiled, for a card that is not here, has no handle
            self._run = self._compiled[self._grid]  # pyright: ignore[reportArgumentType]
            self._bare = bare_launch(self._compiled, self._grid, arguments)
        self._run(*arguments)


def first_launch(
    kernel: Any, grid: tuple[int, ...], arguments: Sequence[Any], constants: Mapping[str, Any], owners: Sequence[int | None],
    operands: Sequence[Tensor | None],
) -> Prepared:  # fmt: skip
    """Launch `kernel[grid](*arguments, **constants)`. Gives what makes it again on operands of other addresses (`Prepared`)."""
    compiled = kernel[grid](*arguments, **constants)
    starts = [0 if t is None else t.data_ptr() for t in operands]
    return Prepared(kernel, compiled, grid, arguments, constants, owners, starts)


class Held:
    """What a launcher holds of its launches, by all that tells one from another; the oldest go where there are too many."""

    def __init__(self, most: int = 4096):
        self._most = most
        self._kept: dict[Hashable, Any] = {}
        self._keeping = Lock()  # backward passes run in threads of their own
        self.get = self._kept.get
        """What was kept for a key, or None."""

    def keep(self, key: Hashable, kept: Any) -> None:
        """Hold it for a key."""
        with self._keeping:
            if len(self._kept) >= self._most and key not in self._kept:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = kept


def pointer_kind(x: Tensor | None) -> tuple[torch.dtype, bool] | None:
    """What Triton chooses a kernel by where it is given a tensor: dtype, whether it starts at 16 bytes; None without one."""
    return None if x is None else (x.dtype, x.data_ptr() % 16 == 0)


def call_key(options: tuple[Any, ...], x: Tensor, *others: Tensor | None) -> Hashable | None:
    """All by which calls of a public function may differ but the memory of their tensors; None: go the long way.

    That is what is not on the current GPU, is traced, wrapped or unaligned, or has a list among its options, which has no hash.
    """
    if type(x) not in _PLAIN or not x.is_cuda or torch.compiler.is_compiling() or indirect() or away(x.get_device()):
        return None
    try:
        hash(options)
    except TypeError:
        return None
    key: list[Any] = [options, scope()]
    starts = 0
    for t in (x, *others):
        if t is None:
            key.append(None)
            continue
        if type(t) not in _PLAIN:  # a subclass may have no memory of its own
            return None
        starts |= t.data_ptr()
        key += (t.shape, t.stride(), t.dtype, t.get_device())
    return None if starts % 16 else tuple(key)


def in_place(*pairs: tuple[Tensor | None, Tensor | None]) -> bool:
    """Whether of each pair both are views of the same memory: an operand that was copied is copied every time."""
    return all(a is None or b is None or a.data_ptr() == b.data_ptr() for a, b in pairs)


_LAUNCHED = Held()


def launch(
    kernel: Any, grid: tuple[int, ...], operands: Sequence[Tensor | None], numbers: tuple[int | float | bool, ...],
    constants: Mapping[str, Any], factors: tuple[float, ...] = (),
) -> Prepared | None:  # fmt: skip
    """`kernel[grid](*operands, *numbers, *factors, **constants)`, the short way where such a launch was made before.

    Gives what makes it again, of addresses of operands that begin at 16 bytes where these do, and of other factors; None where
    no card has run it.

    Args:
        kernel: a jitted function of a module, whose first parameters are pointers.
        grid: programs.
        operands: what they point to; the first is no None.
        numbers: the parameters behind them.
        constants: the rest by name, and options of the launch, in the same order every time.
        factors: the parameters behind the numbers: floats that may be others in the next call of its kind.
    """
    starts = [0 if t is None else t.data_ptr() for t in operands]
    low = 0
    for start in starts:
        low |= start
    first: Any = operands[0]
    key = (
        id(kernel), first.get_device(), grid, numbers, *map(type, numbers), *constants.values(),
        *[None if t is None else t.dtype for t in operands],
        tuple(start % 16 for start in starts) if low % 16 else 0,
    )  # fmt: skip
    held, given = _LAUNCHED.get(key), (*starts, *factors)
    if held is not None:
        held(given)
        return held
    compiled = kernel[grid](*operands, *numbers, *factors, **constants)
    if not env.interpreting():
        count = len(operands)
        owners = (*range(count), *[None] * len(numbers), *range(count, count + len(factors)))
        prepared = Prepared(kernel, compiled, grid, (*operands, *numbers, *factors), constants, owners, given)
        if first.is_cuda:
            _LAUNCHED.keep(key, prepared)
            return prepared
    return None
