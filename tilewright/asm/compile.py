"""Compiles the Triton kernels of an implementation for a card that need not be present.

`record` runs the implementation's own launcher, so it compiles exactly what a call would launch: with the same specialisation,
constants and options. Three replacements make that possible without a GPU and without a CUDA build of torch:

    arguments   meta tensors with the shape, stride, dtype and alignment of the real ones
    driver      answers "which card" with the one asked for; it can load and launch nothing
    run         Triton's `JITFunction.run` compiles as for a warm-up and keeps the kernel instead of launching it

Refuses Triton's interpreter (which never compiles), and launchers that look at values (meta tensors have none). Implementations
that call a vendor library launch no Triton kernel and give an empty list. The driver and `JITFunction.run` are replaced for the
whole process while `record` runs, so nothing else may launch kernels at that time; a lock separates concurrent recordings.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from itertools import count
from math import prod
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import CompilationError, CompiledKernel
from triton.errors import TritonError
from triton.runtime._async_compile import AsyncCompileMode
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from tilewright.hw import env

__all__ = ["Binary", "CompileFailed", "compile_only", "record", "stand_in"]

_LOCK = Lock()
_SESSIONS = count(1)


class CompileFailed(RuntimeError):
    """A kernel does not compile for an architecture; the message is one line with the compiler's error."""


@dataclass(frozen=True, kw_only=True)
class Binary:
    """One compiled kernel."""

    kernel: str
    arch: int
    key: str
    """Triton's hash over source, constants, options and toolchain: equal keys are equal binaries."""
    constants: Mapping[str, Any] = field(repr=False)
    """Compile-time arguments by name, with those that Triton specialised itself (an integer 1, a None)."""
    warps: int
    stages: int
    """The requested `num_stages`, 1 for Gluon; `tilewright.asm.memory` finds the number that the compiler used."""
    shared_bytes: int
    """Dynamic shared memory of a block."""
    tmem_columns: int
    """Tensor memory of a block (sm_100): columns of 512 bytes."""
    blocks: int
    """Thread blocks of the recorded launch; 0 if the grid was a function."""
    ttgir: str = field(repr=False)
    """The program in Triton's GPU dialect, with its final layouts and pipeline."""
    ptx: str = field(repr=False)
    cubin: bytes = field(repr=False)
    log: str | None = field(default=None, repr=False, compare=False)
    """The log of ptxas for `cubin`; None if `cubin` came from Triton's cache, which keeps no log."""


def record(impl: Any, config: Mapping[str, Any], args: Sequence[Any], arch: int) -> list[Binary]:
    """Every kernel that `impl.launch(config, *args)` launches, in order, compiled for `sm_<arch>`.

    Args:
        impl: a `tilewright.op.Impl`.
        config: its tuning choices.
        args: the op's arguments; of tensors only shape, strides, offset and dtype are read, never values.
        arch: 80, 90, 100 ...: compute capability as one number.

    Raises:
        CompileFailed: a kernel does not compile.
        RuntimeError: Triton interprets kernels in this process.
    """
    if env.interpreting():
        raise RuntimeError("record: Triton interprets kernels in this process and compiles none; unset TRITON_INTERPRET")
    with _LOCK, knobs.nvidia.scope(), _recording(arch) as launched:
        knobs.nvidia.dump_ptxas_log = True
        impl.launch(config, *(stand_in(a) for a in args))
    return [_binary(kernel, arch, blocks, log) for kernel, blocks, log in launched]


@contextmanager
def compile_only(arch: int, jobs: int) -> Iterator[None]:
    """While on, every Triton launch of this process compiles for `sm_<arch>` instead, in `jobs` threads, and launches nothing.

    The results are in Triton's cache when it ends. Arguments are meta tensors: no launch has a result.

    Raises:
        CompileFailed: a kernel does not compile.
        RuntimeError: Triton interprets kernels in this process.
    """
    if env.interpreting():
        raise RuntimeError("compile_only: Triton interprets kernels in this process; unset TRITON_INTERPRET")
    # A session of its own: what the process compiled before would else not be asked of Triton's cache again.
    with _LOCK, _recording(arch, next(_SESSIONS)), ThreadPoolExecutor(jobs) as pool:
        try:
            with AsyncCompileMode(pool):
                yield
        except (TritonError, RuntimeError) as error:
            if isinstance(error, CompileFailed):
                raise
            raise CompileFailed(f"a kernel does not compile for sm_{arch}: {_reason(error)}") from error


def stand_in(value: Any) -> Any:
    """A meta tensor laid out and aligned like the given tensor, a parameter if that is one; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    # A meta tensor's address is its offset, so it is aligned as the real one is: allocations start at multiples of 512 bytes.
    offset = value.storage_offset()
    extent = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True)) if value.numel() else 0
    memory = torch.empty(offset + extent, dtype=value.dtype, device="meta")
    found = memory.as_strided(value.shape, value.stride(), offset)
    return Parameter(found, requires_grad=False) if isinstance(value, Parameter) else found


class _Offline:
    """As much of a Triton driver as compiling asks for."""

    def __init__(self, arch: int, session: int = 0):
        self._arch, self._session = arch, session

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._arch, 32)

    def get_current_device(self) -> str:
        # Triton uses this as a key in its table of loaded kernels, so it must differ from the name of every real device.
        return f"offline sm_{self._arch}, session {self._session}"

    def get_current_stream(self, device: str) -> int:
        return 0


class _Printed(StringIO):
    """The output of a compilation, with the log of ptxas kept separately."""

    def __init__(self) -> None:
        super().__init__()
        self.log = ""
        self._in_log = False

    def write(self, text: str) -> int:
        # The log is printed whole, and the end of its last line apart. Blackwell has an assembler of its own: ptxas-blackwell.
        self._in_log = re.match(r"ptxas[\w-]* ", text) is not None or (self._in_log and text == "\n")
        if self._in_log:
            self.log += text
            return len(text)
        return super().write(text)


@contextmanager
def _recording(arch: int, session: int = 0) -> Iterator[list[tuple[CompiledKernel, int, str | None]]]:
    launched: list[tuple[CompiledKernel, int, str | None]] = []
    active, run = driver._active, JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> CompiledKernel:
        printed = _Printed()
        try:
            with redirect_stdout(printed):
                kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        except (TritonError, RuntimeError, ValueError, AssertionError) as error:
            # If ptxas refuses a program, Triton prints all of it; the error says what is wrong.
            raise CompileFailed(f"{self.fn.__qualname__} does not compile for sm_{arch}: {_reason(error)}") from error
        print(printed.getvalue(), end="")
        blocks = 0 if callable(grid) else prod(grid)
        # This is a future of a kernel if `compile_only` compiles in threads.
        launched.append((kernel, blocks, printed.log or None))  # pyright: ignore[reportArgumentType]
        return kernel  # pyright: ignore[reportReturnType]

    driver.set_active(_Offline(arch, session))  # pyright: ignore[reportArgumentType]
    JITFunction.run = compile_only
    try:
        yield launched
    finally:
        JITFunction.run = run
        driver.set_active(active)  # pyright: ignore[reportArgumentType]


def _reason(error: BaseException) -> str:
    """The one line of a compiler's message that says what is wrong."""
    # An error in a function that a kernel calls is the cause of an error at the call, which names only the place of the call.
    while isinstance(error, CompilationError) and error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    assembler = [line for line in lines if re.match(r"ptxas[\w-]*(?: |$).*\b(?:fatal|error)\b", line)]
    return (assembler or lines or [type(error).__name__])[0 if assembler else -1]


def _binary(kernel: CompiledKernel, arch: int, blocks: int, log: str | None) -> Binary:
    names = kernel.src.fn.arg_names
    constants = {".".join([names[path[0]], *map(str, path[1:])]): value for path, value in kernel.src.constants.items()}
    return Binary(
        kernel=kernel.metadata.name,
        arch=arch,
        key=kernel.hash,
        constants=constants,
        warps=kernel.metadata.num_warps,
        stages=1 if kernel.src.fn.is_gluon() else kernel.metadata.num_stages,
        shared_bytes=kernel.metadata.shared,
        tmem_columns=kernel.metadata.tmem_size or 0,
        blocks=blocks,
        ttgir=kernel.asm["ttgir"],
        ptx=kernel.asm["ptx"],
        cubin=kernel.asm["cubin"],
        log=log,
    )
