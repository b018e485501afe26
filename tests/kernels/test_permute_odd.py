"""What conformance cannot say of `classes`: every config, where x begins, bytes touched, who is chosen, machine code."""

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from tilewright.asm.compile import record
from tilewright.asm.facts import facts, sass
from tilewright.hw.device import device_named, device_of
from tilewright.kernels.permute import permute_op
from tilewright.kernels.permute_odd import CLASSES
from tilewright.op import Inputs

GPU = torch.cuda.is_available()
DEVICE = device_of(0 if GPU else -1)
WHERE = "cuda" if GPU else "cpu"
H100 = device_named("h100")
needs_triton = pytest.mark.skipif(not DEVICE.runs_triton, reason="no GPU here: run with TRITON_INTERPRET=1")
needs_interpreter = pytest.mark.skipif(DEVICE.kind != "interpret", reason="watches loads: run with TRITON_INTERPRET=1")
needs_compiler = pytest.mark.skipif(DEVICE.kind == "interpret", reason="Triton's interpreter compiles nothing")


def laid(shape: tuple[int, ...], strides: tuple[int, ...], offset: int, dtype: torch.dtype) -> Tensor:
    """Random numbers with these strides, `offset` elements behind the start of their memory, and nothing behind them."""
    size = offset + 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    held = torch.randint(-99, 99, (size,), generator=torch.Generator().manual_seed(size), dtype=torch.int8)
    return held.to(dtype).to(WHERE).as_strided(shape, strides, offset)


# (shape, strides, elements before x, order)
CASES = {
    "both odd": ((131, 67), (67, 1), 0, (1, 0)),
    "both odd, begins anywhere": ((67, 131), (131, 1), 5, (1, 0)),
    "x odd": ((80, 67), (67, 1), 0, (1, 0)),
    "x odd, begins anywhere": ((80, 67), (67, 1), 3, (1, 0)),
    "y odd": ((67, 160), (160, 1), 0, (1, 0)),
    "y odd, begins anywhere": ((67, 160), (160, 1), 1, (1, 0)),
    "y odd, one column more than a tile": ((513, 48), (48, 1), 0, (1, 0)),
    "y odd, one column less than a tile": ((511, 48), (48, 1), 0, (1, 0)),
    "y odd, two tiles along a": ((35, 144), (144, 1), 0, (1, 0)),
    "tiny": ((3, 5), (5, 1), 1, (1, 0)),
    "rows of y without a whole vector": ((3, 32), (32, 1), 0, (1, 0)),
    "rows of x without a whole word": ((37, 2), (3, 1), 1, (1, 0)),
    "batched, classes begin elsewhere in each": ((3, 35, 64), (2240, 64, 1), 0, (2, 0, 1)),
    "batched, both odd": ((3, 35, 21), (735, 21, 1), 2, (0, 2, 1)),
    "strided": ((60, 83), (97, 1), 7, (1, 0)),
    "four dimensions": ((2, 3, 5, 7), (105, 35, 7, 1), 0, (3, 1, 0, 2)),
    "expanded": ((21, 35), (0, 1), 1, (1, 0)),
    "windows that overlap": ((21, 35), (2, 1), 1, (1, 0)),
}


@needs_triton
@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_every_config(case: str, dtype: torch.dtype) -> None:
    shape, strides, offset, dims = CASES[case]
    x = laid(shape, strides, offset, dtype)
    problem = permute_op.problem(x, list(dims))
    assert CLASSES.refusal(DEVICE, problem) is None
    configs = list(CLASSES.space.configs(DEVICE, problem))
    assert len(configs) == (3 if problem.y_bytes == 16 else 7 - dtype.itemsize)
    assert CLASSES.space.default(DEVICE, problem) in configs
    for config in configs:
        assert torch.equal(CLASSES.launch(config, x, list(dims)), x.permute(dims)), config


@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_no_byte_outside_of_x_is_read(case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither before x, where a word may begin, nor behind it, where one may end; and each byte of y is written once."""
    shape, strides, offset, dims = CASES[case]
    x = laid(shape, strides, offset, dtype)
    begin, end = x.data_ptr(), x.untyped_storage().data_ptr() + x.untyped_storage().nbytes()
    raw: Any = interpreter._interpreter
    touched: list[tuple[int, int]] = []
    written: dict[int, int] = {}

    class Watched:
        def __getattr__(self, name: str) -> Any:
            return getattr(raw, name)

        def load(self, ptrs: Any, mask: Any, other: Any, dtype: Any) -> Any:
            some = ptrs[mask]
            if some.size:
                touched.append((int(some.min()), int(some.max()) + dtype.itemsize))
            return raw.load(ptrs, mask, other, dtype)

        def store(self, ptrs: Any, values: Any, mask: Any) -> Any:
            for at in ptrs[mask].ravel().tolist():
                written[at] = written.get(at, 0) + 1
            return raw.store(ptrs, values, mask)

    monkeypatch.setattr(interpreter, "_interpreter", Watched())
    problem = permute_op.problem(x, list(dims))
    tile = CLASSES.space.default(DEVICE, problem)["BLOCK_A"]
    for config in [c for c in CLASSES.space.configs(DEVICE, problem) if c["BLOCK_A"] == tile]:
        touched.clear()
        written.clear()
        y = CLASSES.launch(config, x, list(dims))
        assert min(low for low, _ in touched) == begin
        assert max(high for _, high in touched) == end
        assert sorted(written) == list(range(y.data_ptr(), y.data_ptr() + y.nbytes, y.element_size()))
        assert max(written.values()) <= (1 if y.shape[-1] >= 32 else 2)  # both ends of a short row may be one


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ({"M": 64, "N": 64}, "is for rows of x or y that do not start at multiples of 4 bytes"),
        ({"M": 66, "N": 66}, "is for rows of x or y that do not start at multiples of 4 bytes"),
        ({"M": 66, "N": 66, "int8": True}, None),
        ({"M": 65, "N": 64}, None),
        ({"M": 64, "N": 65}, None),
        ({"M": 65, "N": 65, "dtype": torch.float32}, "is for elements of 1 and 2 bytes, not 4"),
        ({"M": 65, "N": 65, "rows": True}, "is for tiles, not for rows that stay whole"),
    ],
)
def test_refusals(words: dict[str, Any], reason: str | None) -> None:
    assert permute_op.make is not None
    assert CLASSES.refusal(H100, permute_op.problem(*permute_op.make(Inputs("meta"), **words))) == reason


@pytest.mark.parametrize("card", ["a100", "h100", "b200"])
def test_is_not_chosen_before_it_is_measured(card: str) -> None:
    for example in permute_op.examples:
        args = example.make(Inputs())
        choice = permute_op.choose(device_named(card), permute_op.problem(*args))
        assert (choice.impl.name, choice.source) == ("triton", "default"), example.label
    assert permute_op.make is not None
    for int8 in (False, True):
        for m, n in ((4097, 8192), (8192, 4097), (4097, 4097)):
            problem = permute_op.problem(*permute_op.make(Inputs("meta"), M=m, N=n, int8=int8))
            assert permute_op.choose(device_named(card), problem).impl.name == "triton"


def accesses(words: dict[str, Any], store_bytes: int) -> dict[str, int]:
    """How often each global access stands in the default's code on sm_90, with stores of so many bytes."""
    assert permute_op.make is not None
    args = permute_op.make(Inputs("meta"), **words)
    config = dict(CLASSES.space.default(H100, permute_op.problem(*args)), STORE_BYTES=store_bytes)
    (binary,) = record(CLASSES, config, args, 90)
    assert facts(binary).spill_bytes == 0
    assert facts(binary).registers <= 128  # two blocks of 8 warps an SM
    found = re.findall(r"\b((?:LDG|STG)\.E[.\w]*)", sass(binary))
    return {name: found.count(name) for name in set(found)}


@needs_compiler
@pytest.mark.parametrize("int8", [False, True])
def test_machine_code_of_odd_rows_of_y(int8: bool) -> None:
    """Stores are whole, and so are loads of classes whose words lie side by side."""
    words = {"M": 2047, "N": 2048, "int8": int8}
    per_thread = (64 * 256 if int8 else 32 * 256) // 256
    size = 1 if int8 else 2
    narrow = accesses(words, 4)
    assert narrow["STG.E"] == per_thread * size // 4
    assert narrow["LDG.E.128"] == per_thread * size // 16 * (4 // size)  # each class loads all words
    assert "LDG.E" not in narrow
    assert accesses(words, 8)["STG.E.64"] == per_thread * size // 8
    assert accesses(words, 16)["STG.E.128"] == per_thread * size // 16


@needs_compiler
@pytest.mark.parametrize("int8", [False, True])
def test_machine_code_of_odd_rows_of_x(int8: bool) -> None:
    """Two words for a word of elements; single elements in tiles at the ends of x's memory alone."""
    found = accesses({"M": 2048, "N": 2047, "int8": int8}, 16)
    size = 1 if int8 else 2
    per_thread = math.prod((128, 128) if int8 else (128, 64)) // 256
    assert found["LDG.E"] == 2 * per_thread * size // 4
    assert found["STG.E.128"] == per_thread * size // 16
