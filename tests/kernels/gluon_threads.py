"""Gluon kernels as threads of Python: a kernel's source, run as it stands on tensors of torch, each group of warps a thread.

What Gluon brings is played: memory barriers with their parities and byte counts, copies of boxes, asynchronous products. So a
schedule is run without a card: tiles that overlap or are left out, a stage that is overwritten while it is read, bytes that do
not add up, groups of warps that wait for each other. A wait that never ends is a `Stuck`.
"""

import ast
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

PATIENCE = 60.0
"""Seconds after which a wait counts as one without an end: a run takes less than one."""


class Stuck(AssertionError):
    """A barrier that nobody completes."""


class Barrier:
    """A memory barrier: a round completes when its arrivals and its bytes are there."""

    def __init__(self) -> None:
        self.lock = threading.Condition()
        self.count = self.left = self.bytes = self.rounds = 0

    def init(self, count: int) -> None:
        self.count = self.left = count

    def _settle(self) -> None:
        assert self.left >= 0, "more arrivals than a round has"
        if self.left == 0 and self.bytes == 0:
            self.left, self.rounds = self.count, self.rounds + 1
            self.lock.notify_all()

    def arrive(self, count: int = 1, *, pred: Any = True) -> None:
        with self.lock:
            if pred:
                self.left -= count
                self._settle()

    def expect(self, size: int) -> None:
        with self.lock:
            self.bytes += size
            self.left -= 1
            self._settle()

    def landed(self, size: int) -> None:
        with self.lock:
            self.bytes -= size
            self._settle()

    def wait(self, parity: int) -> None:
        time.sleep(random.random() * 2e-4)  # other groups of warps get ahead, or fall behind
        with self.lock:
            if not self.lock.wait_for(lambda: self.rounds % 2 != parity, PATIENCE):
                raise Stuck(
                    f"a barrier waits in round {self.rounds}, parity {parity}: {self.left} arrivals, {self.bytes} bytes"
                )


class Barriers:
    def __init__(self, count: int):
        self.held = [Barrier() for _ in range(count)]

    def index(self, i: int) -> Barrier:
        return self.held[i]


class Buffers:
    """Shared memory of several buffers, or one of them."""

    def __init__(self, memory: Tensor, dtype: Any):
        self.memory, self.dtype = memory, dtype

    @property
    def shape(self) -> list[int]:
        return list(self.memory.shape)

    def index(self, i: int) -> "Buffers":
        return Buffers(self.memory[i], self.dtype)

    def slice(self, start: int, length: int, dim: int = 0) -> "Buffers":
        return Buffers(self.memory.narrow(dim, start, length), self.dtype)

    def permute(self, dims: tuple[int, ...]) -> "Buffers":
        return Buffers(self.memory.permute(dims), self.dtype)


class Pointer:
    """Memory of a tensor, from an element on; or from several."""

    def __init__(self, base: Tensor, at: int | Tensor = 0):
        self.base, self.at = base, at

    def __add__(self, elements: int | Tensor) -> "Pointer":
        return Pointer(self.base, self.at + elements)


class Whole(int):
    """A number of a program, which device code may widen."""

    def __add__(self, other: int) -> "Whole":
        return Whole(int(self) + int(other))

    def to(self, kind: Any) -> "Whole":
        return self


def load(pointer: Pointer, mask: Any = True, other: Any = None) -> Any:
    memory = pointer.base.as_strided((pointer.base.untyped_storage().size() // pointer.base.element_size(),), (1,), 0)
    if isinstance(pointer.at, Tensor):
        inside = pointer.at.clamp(0, memory.shape[0] - 1)
        assert (inside == pointer.at)[torch.as_tensor(mask).expand_as(inside)].all(), "a load outside of its tensor"
        return torch.where(torch.as_tensor(mask), memory[inside].double(), other)
    return memory[pointer.at].item() if mask else other


def language(**more: Any) -> SimpleNamespace:
    """What device code calls `gl`, with a kernel's own names beside it."""
    names: dict[str, Any] = {
        "NVMMADistributedLayout": lambda **given: None, "SliceLayout": lambda dim, layout: None,
        "arange": lambda start, end, layout: torch.arange(start, end), "cdiv": lambda a, b: -(-a // b),
        "constexpr": lambda value: value, "expand_dims": torch.unsqueeze, "float32": torch.float32, "int32": torch.int32,
        "int64": torch.int64, "int8": torch.int8, "load": load, "maximum": max, "minimum": min,
        "shared_memory_descriptor": object, "static_assert": lambda *given: None, "static_range": range, "tensor": object,
        "to_tensor": Whole, "where": lambda condition, a, b: a if condition else b,
        "zeros": lambda shape, dtype, layout: torch.zeros(shape).double(),
    }  # fmt: skip
    return SimpleNamespace(**names | more)


def replayed(module: ModuleType, **names: Any) -> dict[str, Any]:
    """The source of a module, run with these names in the place of what it imports."""
    assert module.__file__ is not None
    tree = ast.parse(Path(module.__file__).read_text())
    tree.body = [node for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom)]
    decorators = SimpleNamespace(jit=_decorated, constexpr_function=_decorated)
    scope: dict[str, Any] = {"Any": Any, "gluon": decorators, "aggregate": _decorated, **names}
    exec(compile(tree, module.__file__, "exec"), scope)
    return scope


def _decorated(function: Any = None, **options: Any) -> Any:
    return function if callable(function) else lambda f: f


def together(groups: Sequence[Callable[[], None]]) -> None:
    """Run groups of warps at once; raise what one of them raises."""
    with ThreadPoolExecutor(len(groups)) as pool:
        for done in [pool.submit(group) for group in groups]:
            done.result()
