"""The short way of a launch gives the C code what Triton's own way gives it; here Triton's launcher ends in a list."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton import knobs
from triton.backends.nvidia import driver as of_triton
from triton.compiler.compiler import CompiledKernel
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.driver import driver

from tilewright.hw import env
from tilewright.kernels.launch import driver_call as of_bare
from tilewright.kernels.launch.replay import Prepared

pytestmark = pytest.mark.skipif(env.interpreting(), reason="the interpreter has no launcher")
META = {
    "swizzle": 3, "elem_size": 2, "elem_type": 6, "block_size": [8, 32], "fp4_padded": False, "is_im2col": False,
}  # fmt: skip


class Code:
    """Triton's C function, which takes everything as it is."""

    def __init__(self) -> None:
        self.given: list[tuple[Any, ...]] = []

    def __call__(self, *given: Any) -> None:
        self.given.append(given)


class Launcher:
    """Triton's launcher without a driver behind it."""

    num_ctas = global_scratch_align = profile_scratch_align = 1
    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid = launch_pdl = gsan_enabled = False
    arg_annotations = kernel_signature = None
    __call__ = of_triton.CudaLauncher.__call__
    launch: Any


@pytest.fixture
def driven(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    active = SimpleNamespace(encoded=0, stream=11)

    def encode(*given: Any) -> tuple[Any, ...]:
        active.encoded += 1
        return ("bits", given[0])

    active.utils = SimpleNamespace(fill_tma_descriptor=encode, fill_tma_descriptor_tiled=encode)
    active.get_current_device = lambda: 0
    active.get_current_stream = lambda device: active.stream
    monkeypatch.setattr(driver, "_active", active)
    monkeypatch.setattr(of_bare, "_ENCODED", {})
    return active


def prepared(x: torch.Tensor, code: Code, described: bool) -> Prepared:
    """A launch of (x as a descriptor or a pointer, x, 7, a constant) of the C function `code`."""
    compiled: Any = object.__new__(CompiledKernel)
    compiled.module, compiled.function, compiled.packed_metadata, compiled.name = 1, 77, (4, 1, 0), "k"
    compiled.src, compiled._module_pid, compiled._run = SimpleNamespace(), -1, Launcher()
    signature = {0: "tensordesc<fp16[8, 32]>" if described else "*fp16", 1: "*fp16", 2: "i32", 3: "constexpr"}
    compiled._run.launch = of_triton.wrap_handle_tensordesc(code, signature, [META] if described else None)
    layout: Any = gl.NVMMASharedLayout.get_default_for([8, 32], gl.float16)
    first = TensorDescriptor(x, list(x.shape), list(x.stride()), [8, 32], layout) if described else x
    kernel = SimpleNamespace(arg_names=["a", "b", "n", "BLOCK"])
    return Prepared(kernel, compiled, (5, 2), (first, x, 7), {"BLOCK": 32}, (0, 0), [x.data_ptr()])


@pytest.mark.parametrize("described", [False, True])
def test_the_same_to_the_driver(described: bool, driven: SimpleNamespace) -> None:
    code, x = Code(), torch.zeros(16, 64, dtype=torch.float16)
    launch = prepared(x, code, described)
    addresses = (4096, 4096, 8192, 8192, 4096, 8192)
    for address in addresses:
        launch((address,))
    driven.stream = 12
    launch((4096,))
    bare = launch._bare
    assert bare is not None, "Triton's launcher is not what launch/driver_call.py knows: launches go the long way"
    assert bare.encodes == described
    flat = [(*given[:-1], *given[-1]) if isinstance(given[-1], (list, tuple)) else given for given in code.given]
    hooks = (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
    # Triton's own way, the first, names hooks, of which there are none, and what they would be told.
    assert [any(h is v for v in flat[0] for h in hooks), any(h is v for v in flat[1] for h in hooks)] == [True, False]
    for address, given in zip((*addresses, 4096), flat, strict=True):
        kernel = [v for v in given[4:] if v is not None and not any(h is v for h in hooks)]
        begin = ("bits", address) if described else address
        assert (given[0:3], given[3]) == ((5, 2, 1), 12 if given is flat[-1] else 11)
        assert begin in kernel
        assert kernel[-3:] == [address, 7, 32]
    encodings = {False: 0, True: 1 + 2 + 1}  # the first way's own, two addresses, another stream
    assert driven.encoded == encodings[described]


def test_hooks_are_called(driven: SimpleNamespace) -> None:
    code, x, hook = Code(), torch.zeros(16, dtype=torch.float16), lambda metadata: None
    launch = prepared(x, code, False)
    launch((4096,))
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        launch((4096,))
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    launch((4096,))
    named = [any(v is knobs.runtime.launch_enter_hook for v in given) for given in code.given]
    assert named == [True, True, False]


def test_what_it_does_not_know() -> None:
    unknown: Any = SimpleNamespace(run=SimpleNamespace(launch=lambda *a: None, global_scratch_size=0, profile_scratch_size=0))
    assert of_bare.bare_launch(unknown, (1, 1, 1), ()) is None
    unknown.run.launch, unknown.run.global_scratch_size = Code(), 128
    assert of_bare.bare_launch(unknown, (1, 1, 1), ()) is None
    stub: Any = SimpleNamespace()
    assert of_bare.bare_launch(stub, (1, 1, 1), ()) is None
