"""What conformance cannot say of `words`: every config, where x begins, bytes touched, who is chosen, machine code."""

import itertools
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from tilewright import ops
from tilewright.asm.compile import Binary, record
from tilewright.asm.facts import facts, sass
from tilewright.hw.device import device_named, device_of
from tilewright.kernels.layout.permute import permute_op
from tilewright.kernels.layout.unaligned import WORDS
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


def apart(configs: list[Any]) -> list[Any]:
    """Those that do not run the same program here: the interpreter has no warps."""
    return configs if GPU else list({(c["BLOCK_A"], c["BLOCK_B"]): c for c in configs}.values())


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
    "batched, rows of y begin elsewhere in each": ((3, 35, 64), (2240, 64, 1), 0, (2, 0, 1)),
    "batched, both odd": ((3, 35, 21), (735, 21, 1), 2, (0, 2, 1)),
    "strided": ((60, 83), (97, 1), 7, (1, 0)),
    "batched and strided": ((2, 131, 67), (133 * 131, 133, 1), 3, (0, 2, 1)),
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
    assert WORDS.refusal(DEVICE, problem) is None
    configs = list(WORDS.space.configs(DEVICE, problem))
    assert len(configs) == (2 if problem.x_bytes < 4 and problem.y_bytes < 16 and dtype == torch.int8 else 3)
    assert WORDS.space.default(DEVICE, problem) in configs
    for config in apart(configs):
        assert torch.equal(WORDS.launch(config, x, list(dims)), x.permute(dims)), config


@needs_triton
@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16])
def test_large_batches_of_strided_ones(dtype: torch.dtype) -> None:
    """By the public function, which chooses `words` for them."""
    x = laid((2, 515, 513), (513 * 515, 513, 1), 3, dtype)
    cuts = (x, x[:, :513], x[1:, :513])
    assert [permute_op.choice_for(cut, [0, 2, 1]).impl.name for cut in cuts] == ["words"] * 3
    for cut in cuts if GPU else cuts[2:]:  # a matrix of this size takes the interpreter seconds
        assert torch.equal(ops.permute(cut, (0, 2, 1)), cut.mT)


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
                for byte in range(at, at + values.dtype.itemsize):
                    written[byte] = written.get(byte, 0) + 1
            return raw.store(ptrs, values, mask)

    monkeypatch.setattr(interpreter, "_interpreter", Watched())
    problem = permute_op.problem(x, list(dims))
    tile = WORDS.space.default(DEVICE, problem)["BLOCK_A"]
    for config in apart([c for c in WORDS.space.configs(DEVICE, problem) if c["BLOCK_A"] == tile]):
        touched.clear()
        written.clear()
        y = WORDS.launch(config, x, list(dims))
        assert min(low for low, _ in touched) == begin
        assert max(high for _, high in touched) == end
        assert sorted(written) == list(range(y.data_ptr(), y.data_ptr() + y.nbytes))
        assert max(written.values()) <= (1 if y.shape[-1] >= 32 else 2)  # both ends of a short row may be one


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ({"M": 64, "N": 64}, "is only for rows of x or y that do not start at multiples of 4 bytes"),
        ({"M": 66, "N": 66}, "is only for rows of x or y that do not start at multiples of 4 bytes"),
        ({"M": 66, "N": 66, "int8": True}, None),
        ({"M": 65, "N": 64}, None),
        ({"M": 64, "N": 65}, None),
        ({"M": 65, "N": 65, "dtype": torch.float32}, "supports elements of 1 and 2 bytes only, not 4"),
        ({"M": 65, "N": 65, "rows": True}, "is for permutations that move the last dimension: here whole rows are copied"),
    ],
)
def test_refusals(words: dict[str, Any], reason: str | None) -> None:
    assert permute_op.make is not None
    assert WORDS.refusal(H100, permute_op.problem(*permute_op.make(Inputs("meta"), **words))) == reason


def chosen(card: str, x: Tensor, dims: tuple[int, ...]) -> str:
    choice = permute_op.choose(device_named(card), permute_op.problem(x, list(dims)))
    assert choice.source == "default"
    return choice.impl.name


@pytest.mark.parametrize("card", ["a100", "h100", "b200"])
def test_is_chosen_where_it_pays(card: str) -> None:
    """Of matrices, batches and strided ones: both sides of the tile over 512 elements, and one that starts anywhere."""

    def of(*shape: int, dims: tuple[int, ...] = (1, 0), dtype: torch.dtype = torch.bfloat16, cut: int = 0) -> str:
        return chosen(card, torch.empty(shape, dtype=dtype, device="meta")[..., : shape[-1] - cut], dims)

    for dtype in (torch.int8, torch.bfloat16):
        for m, n in ((4097, 8192), (8192, 4097), (4097, 4097), (513, 520), (520, 513)):
            assert of(m, n, dtype=dtype) == "words"
        assert of(2, 1000, 4097, dims=(0, 2, 1), dtype=dtype) == "words"
        assert of(4097, 3, 1000, dims=(2, 1, 0), dtype=dtype) == "words"
        assert of(4096, 4096, cut=5, dtype=dtype) == "words"
        # a side too short, be it the odd one or the other
        for m, n in ((512, 4097), (4097, 512), (4096, 511), (511, 4096), (3, 4097), (4097, 3)):
            assert of(m, n, dtype=dtype) == "triton"
        assert of(4096, 64, 257, dims=(0, 2, 1), dtype=dtype) == "triton"
        assert of(4096, 4096, dtype=dtype) == "triton"
        assert of(4097, 4097, 40, dims=(1, 0, 2), dtype=dtype) == "triton"
    assert of(4098, 4098) == "triton"
    assert of(4098, 4098, dtype=torch.int8) == "words"
    assert of(4097, 4097, dtype=torch.float32) == "triton"


def test_small_ones_are_not_chosen() -> None:
    for example in permute_op.examples:
        x, dims = example.make(Inputs())
        assert chosen("h100", x, dims) == "triton", example.label


def compiled(words: dict[str, Any]) -> tuple[dict[str, int], Binary]:
    """How often each access of memory stands in the default's code on sm_90, and the binary."""
    assert permute_op.make is not None
    args = permute_op.make(Inputs("meta"), **words)
    (binary,) = record(WORDS, WORDS.space.default(H100, permute_op.problem(*args)), args, 90)
    assert facts(binary).spill_bytes == 0
    assert facts(binary).registers <= 128  # two blocks of 8 warps an SM
    found = re.findall(r"\b((?:LDG|STG|LDS|STS)\b[.\w]*)", sass(binary))
    return {name: found.count(name) for name in set(found)}, binary


@needs_compiler
@pytest.mark.parametrize("int8", [False, True])
def test_machine_code_of_odd_rows_of_y(int8: bool) -> None:
    """Vectors of 16 bytes on either side and into shared memory; out of it five words for four, and no other exchange."""
    found, binary = compiled({"M": 2047, "N": 2048, "int8": int8})
    vectors = 64 * 128 * 2 // 16 // 256  # of a thread
    assert found["LDG.E.128"] == found["STS.128"] == found["STG.E.128"] == vectors
    assert found["LDS"] == 5 * vectors
    assert not {"LDG.E", "LDG.E.64", "STG.E", "STG.E.64", "STS.64", "LDS.64", "LDS.128"} & set(found)
    assert binary.shared_bytes == 64 * 128 * 2 // (4 if int8 else 2)  # words of one element of a word after the other
    # a warp stores and gathers 4 vectors of each of 8 rows: what test_gather_meets_every_bank_once stands on
    layouts = dict(re.findall(r"^(#\w+) = (#ttg.*)$", binary.ttgir, re.MULTILINE))
    (stored_as,) = set(re.findall(r"tt\.store .*tensor<\d+x16x!tt\.ptr<i32>, (#\w+)>", binary.ttgir))
    assert "sizePerThread = [1, 4], threadsPerWarp = [8, 4]" in layouts[stored_as]


@needs_compiler
@pytest.mark.parametrize("int8", [False, True])
def test_machine_code_of_odd_rows_of_x(int8: bool) -> None:
    """Two words for a word of elements; single elements in tiles at the ends of x's memory alone."""
    found, _ = compiled({"M": 2048, "N": 2047, "int8": int8})
    words = 128 * 256 // 4 // 512 if int8 else 64 * 128 * 2 // 4 // 256  # of a thread
    assert found["LDG.E"] == 2 * words
    assert found["STG.E.128"] == words // 4


@pytest.mark.parametrize("step", [4097, 4098, 4099, 4100])
@pytest.mark.parametrize("itemsize", [1, 2])
def test_gather_meets_every_bank_once(itemsize: int, step: int) -> None:
    """A warp takes words of eight rows and four vectors: the places that `_shifted` computes are in 32 banks."""
    per_word, width = 4 // itemsize, 32
    align = 32 // itemsize
    for lane_row in range(0, width, 8):
        starts = {r: align - r * per_word * step % align for r in range(lane_row, lane_row + 8)}
        for first, word in itertools.product(range(0, 32, 4), range(5)):
            k = {(r, v): start // per_word + 4 * v + word for r, start in starts.items() for v in range(first, first + 4)}
            banks = {(row * width + (r ^ row // 4 % 4 * 8)) % 32 for (r, _), row in k.items()}
            assert len(banks) == 32
