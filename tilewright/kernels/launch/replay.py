"""Repeated launches: the same compiled kernel, grid and numbers, on other memory.

To find the right binary, a launch through Triton's `kernel[grid](...)` inspects each argument. For that it also checks each TMA
descriptor and converts it to text. For a kernel of forty arguments this takes tens of microseconds of host time, more than a
convolution of one image. If a launcher knows that a call differs from an earlier one only in its addresses, it uses a stored
`Prepared` and passes it the new addresses. `Held` stores these under keys. A key contains everything that must be the same:
shapes, strides, dtypes, constants, the card, and which addresses are multiples of 16.

From its second launch on, a `Prepared` uses driver_call.py. It keeps no tensor alive, because it stores only offsets into
operands. Launchers make a `Prepared` for every launch and store those that have run on a card. A recording for an absent card
(asm/compile.py) uses the same code, so it shows errors in it.
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
    """Stands for a descriptor's tensor; it has only an address."""

    __slots__ = ("pointer",)

    def __init__(self, pointer: int):
        self.pointer = pointer

    def data_ptr(self) -> int:
        return self.pointer


class Prepared:
    """A launch that can be repeated on operands at other addresses.

    Args:
        kernel: the jitted function; it gives the order of the parameters.
        compiled: the object that the first launch returned.
        grid: the number of programs, one to three numbers.
        arguments: the positional arguments of the launch: tensors, descriptors, numbers, None.
        constants: the other arguments, by name.
        owners: for each of the first arguments, the index of the operand that it points into, or that it is (a float that
            changes from launch to launch). None for an argument that stays the same.
        operands: the addresses of that launch's operands, and the floats that change.
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
        """The launch's arguments for operands at these addresses."""
        arguments = self._arguments.copy()
        for i, owner, offset, fields in self._places:
            at: Any = operands[owner] + offset
            if fields is not None:
                # The constructor would repeat checks that passed in the first launch.
                described = object.__new__(fields[0])
                described.__dict__.update(fields[1], base=_Base(at))
                at = described
            arguments[i] = at
        return arguments

    def _launch(self, operands: Sequence[float]) -> None:
        """Launch through Triton. The first such launch creates the kernel's handle."""
        arguments = self._on(operands)
        if self._run is None:  # not in __init__: a kernel that was only compiled for an absent card has no handle
            self._run = self._compiled[self._grid]  # pyright: ignore[reportArgumentType]
            self._bare = bare_launch(self._compiled, self._grid, arguments)
        self._run(*arguments)


def first_launch(
    kernel: Any, grid: tuple[int, ...], arguments: Sequence[Any], constants: Mapping[str, Any], owners: Sequence[int | None],
    operands: Sequence[Tensor | None],
) -> Prepared:  # fmt: skip
    """Launch `kernel[grid](*arguments, **constants)`. Returns a `Prepared` that repeats it on operands at other addresses."""
    compiled = kernel[grid](*arguments, **constants)
    starts = [0 if t is None else t.data_ptr() for t in operands]
    return Prepared(kernel, compiled, grid, arguments, constants, owners, starts)


class Held:
    """A launcher's stored launches, under keys that tell them apart. If there are too many, the oldest is dropped."""

    def __init__(self, most: int = 4096):
        self._most = most
        self._kept: dict[Hashable, Any] = {}
        self._keeping = Lock()  # backward passes run in threads of their own
        self.get = self._kept.get
        """The object stored under a key, or None."""

    def keep(self, key: Hashable, kept: Any) -> None:
        """Store an object under a key."""
        with self._keeping:
            if len(self._kept) >= self._most and key not in self._kept:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = kept


def pointer_kind(x: Tensor | None) -> tuple[torch.dtype, bool] | None:
    """The properties of a tensor by which Triton selects a binary: (dtype, whether its address is a multiple of 16)."""
    return None if x is None else (x.dtype, x.data_ptr() % 16 == 0)


def call_key(options: tuple[Any, ...], x: Tensor, *others: Tensor | None) -> Hashable | None:
    """A key with everything in which two calls of a public function may differ, except addresses; None: do not replay.

    None is returned for tensors that are not on the current GPU, are wrapped, or do not start at a multiple of 16 bytes; while
    torch.compile traces or calls must go through the dispatcher; and if the options contain a list, which cannot be hashed.
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
    """Whether the two tensors of each pair start at the same address; a pair with None counts as equal.

    With a pair (operand, operand as launched), False means that the operand was copied, so that every call must copy it.
    """
    return all(a is None or b is None or a.data_ptr() == b.data_ptr() for a, b in pairs)


_LAUNCHED = Held()


def launch(
    kernel: Any, grid: tuple[int, ...], operands: Sequence[Tensor | None], numbers: tuple[int | float | bool, ...],
    constants: Mapping[str, Any], factors: tuple[float, ...] = (),
) -> Prepared | None:  # fmt: skip
    """`kernel[grid](*operands, *numbers, *factors, **constants)`, by replay if such a launch was made before.

    Args:
        kernel: a jitted function at module level. Its first parameters are pointers.
        grid: the number of programs.
        operands: the tensors that the pointers point to; the first is not None.
        numbers: the parameters after the pointers.
        constants: the other parameters by name, and launch options; always in the same order.
        factors: the parameters after the numbers: floats that may change from call to call.

    Returns:
        A `Prepared` that repeats the launch for other addresses and factors; the addresses must have the same remainders
        modulo 16. None if the launch did not run on a card.
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
