"""What conformance cannot say of paged attention: every split, page size, number of queries, codes, invariance.

What it refuses is in test_paged_bad_input.py.
"""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from tests import conformance
from tilewright import ops
from tilewright.formats import encode
from tilewright.hw.device import CARD_OF_ARCH, device_of
from tilewright.kernels.attention.paged import decode_sm90 as paged_sm90_launch
from tilewright.kernels.attention.paged import split_kv as paged_stream
from tilewright.kernels.attention.paged.attention import _example, paged_attention_op
from tilewright.kernels.attention.paged.decode_sm90 import SM90
from tilewright.kernels.attention.paged.prefill_sm90 import INVARIANT_SM90, VARLEN_SM90
from tilewright.kernels.attention.paged.split_kv import STREAM
from tilewright.op import Inputs, invariant

DEVICE = device_of(0 if torch.cuda.is_available() else -1)
WHERE = "cuda" if DEVICE.kind == "cuda" else "cpu"
needs_triton = pytest.mark.skipif(not DEVICE.runs_triton, reason="no GPU here: run with TRITON_INTERPRET=1")
FEW_SMS = replace(DEVICE, sms=3)
ops_by_name = {op.name: op for op in ops.ALL}
IMPLS = {impl.name: impl for impl in paged_attention_op.impls}


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short ranges, and three programs for each of PER_SM: an H100's 132 SMs would take the interpreter minutes."""
    monkeypatch.setattr(paged_stream, "card_of", lambda x: FEW_SMS)


def small(**more: Any) -> dict[str, Any]:
    """A config of `stream` with tiles that short sequences have several of."""
    return {"PER_SM": 1, "BLOCK_N": 32, "num_warps": 4, "num_stages": 2, "maxnreg": 168} | more


@needs_triton
@pytest.mark.parametrize(
    ("lengths", "more"),
    [
        (((1, 96), (1, 1), (1, 32), (1, 0), (1, 33)), {}),  # ranges end at, before and behind a sequence's end
        (((1, 330), (1, 3)), {"PER_SM": 3}),  # one sequence for all programs, a hundred times the other
        (((1, 100),) * 4, {"PER_SM": 2}),  # every range begins inside a sequence
        (((1, 64), (1, 40)), {"BLOCK_N": 128}),  # no sequence is cut
    ],
)
def test_every_way_to_cut(lengths: Any, more: dict[str, int]) -> None:
    example = _example("", lengths, heads=(2, 1), dim=16)
    conformance.check(paged_attention_op, STREAM, small(**more), example.make(Inputs(WHERE, seed=1)))


@needs_triton
def test_more_sequences_than_a_program_counts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 260
    if DEVICE.kind == "interpret":  # where a kernel may be changed, and 260 sequences take a minute
        monkeypatch.setattr(paged_stream, "_COUNTED", tl.constexpr(8))
        count = 21
    example = _example("", tuple((1, i * 37 % 50) for i in range(count)), heads=(1, 1), dim=16)
    conformance.check(paged_attention_op, STREAM, small(), example.make(Inputs(WHERE, seed=2)))


@needs_triton
@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize("format", ["", "int8", "fp8"])
def test_page_sizes(page_size: int, format: str) -> None:
    example = _example("", ((1, page_size + 1), (1, 2 * page_size), (1, page_size - 1)), (2, 1), 32, page_size, format=format)
    conformance.check(paged_attention_op, STREAM, small(), example.make(Inputs(WHERE, seed=3)))


@needs_triton
@pytest.mark.parametrize("queries", [2, 5, 16])
@pytest.mark.parametrize(("window", "sinks", "format"), [(None, False, ""), (7, True, ""), (40, False, "int8")])
def test_few_queries(queries: int, window: int | None, sinks: bool, format: str) -> None:
    lengths = ((queries, 90), (1, 1), (0, 20), (queries - 1, queries - 1))
    example = _example("", lengths, (4, 2), 16, 16, window, torch.float32, format, sinks)
    conformance.check(paged_attention_op, STREAM, small(), example.make(Inputs(WHERE, seed=4)))


HOPPER = DEVICE.kind == "cuda" and DEVICE.arch == 90
FLOATS = ((16, 1, 128, None), (64, 1, 128, None), (32, 1, 64, 50), (64, 5, 128, None), (128, 16, 64, 70))
QUANTIZED = ((16, 1, 128, None), (16, 1, 64, 50), (32, 1, 64, None), (64, 5, 128, 70), (128, 16, 64, None))


def by_config(cases: Any) -> list[Any]:
    """Each case with the default config, and those of one query with the others: 120 kernels, some two minutes of compiling."""
    return [(*case, "default") for case in cases] + [(*case, "others") for case in cases if case[1] == 1]


def check_hopper(args: Any, configs: str) -> None:
    problem = paged_attention_op.problem(*args)
    default = SM90.space.default(DEVICE, problem)
    others = (config for config in SM90.space.configs(DEVICE, problem) if config != default)
    for config in [default] if configs == "default" else others:
        conformance.check(paged_attention_op, SM90, config, args)


@pytest.mark.skipif(not HOPPER, reason="Gluon for sm_90 runs on no other card, and not in Triton's interpreter")
@pytest.mark.parametrize(("page_size", "queries", "dim", "window", "configs"), by_config(FLOATS))
def test_hopper(
    page_size: int, queries: int, dim: int, window: int | None, configs: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """With fewer sequences than are counted one by one and with more; pages poisoned as in all examples."""
    monkeypatch.setattr(paged_sm90_launch, "card_of", lambda x: replace(DEVICE, sms=7))
    ends = [(queries, queries), (1, 64), (1, 65), (0, 20), (queries, 700), (1, 1)]
    for lengths in (tuple(ends[-3:]), tuple(ends * 3)):
        example = _example("", lengths if queries > 1 else tuple((1, kv) for _, kv in lengths), (4, 1), dim, page_size, window)
        check_hopper(example.make(Inputs(WHERE, seed=10)), configs)


@pytest.mark.skipif(not HOPPER, reason="Gluon for sm_90 runs on no other card, and not in Triton's interpreter")
@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize(("page_size", "queries", "dim", "window", "configs"), by_config(QUANTIZED))
def test_hopper_codes(
    format: str, page_size: int, queries: int, dim: int, window: int | None, configs: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """As the test before; the scales of what is not there are NaN."""
    monkeypatch.setattr(paged_sm90_launch, "card_of", lambda x: replace(DEVICE, sms=7))
    ends = ((queries, queries), (1, 64), (1, 65), (0, 20), (queries, 700), (1, 1))
    lengths = ends if queries > 1 else tuple((1, kv) for _, kv in ends * 3)
    check_hopper(_example("", lengths, (4, 1), dim, page_size, window, format=format).make(Inputs(WHERE, seed=13)), configs)


WITHOUT_KEYS = [
    (700, 65, 1, *[0] * 40),  # padding of a captured step
    (0, 0, 64, 0, 0, 700, 0, 1, 0, 0, 0, 3),  # in between
    (0, 90, 0, 700, 0),  # so few that they are counted one by one
    (0, 0, 0),
    (0,) * 300,
]
"""Lengths of sequences with one query each. Rows without keys are zeros, and cost no range."""


@needs_triton
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("lengths", WITHOUT_KEYS)
def test_rows_without_keys(lengths: tuple[int, ...], sinks: bool) -> None:
    lengths = tuple(kv % 130 for kv in lengths[:40]) if DEVICE.kind == "interpret" else lengths
    example = _example("", tuple((1, kv) for kv in lengths), (2, 1), 32, 16, None, sinks=sinks)
    conformance.check(paged_attention_op, STREAM, small(), example.make(Inputs(WHERE, seed=14)))


@pytest.mark.skipif(not HOPPER, reason="Gluon for sm_90 runs on no other card, and not in Triton's interpreter")
@pytest.mark.parametrize("format", ["", "int8"])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("lengths", WITHOUT_KEYS)
def test_hopper_rows_without_keys(lengths: tuple[int, ...], sinks: bool, format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_sm90_launch, "card_of", lambda x: replace(DEVICE, sms=7))
    example = _example("", tuple((1, kv) for kv in lengths), (4, 2), 128, 16, None, format=format, sinks=sinks)
    check_hopper(example.make(Inputs(WHERE, seed=14)), "default")


EDGES = ((127, 127), (128, 128), (33, 130), (0, 20), (1, 129), (1, 1), (32, 128), (31, 257), (64, 64), (1, 300), (5, 0))


@pytest.mark.skipif(not HOPPER, reason="Gluon for sm_90 runs on no other card, and not in Triton's interpreter")
@pytest.mark.parametrize(
    ("heads", "dim", "page_size", "window", "sinks"),
    [
        ((8, 2), 128, 16, None, False),
        ((6, 2), 64, 32, 50, True),  # of three heads that share keys each has tiles of its own
        ((2, 2), 128, 64, None, True),
        ((8, 1), 64, 128, 129, False),
        ((64, 1), 128, 16, 20, True),  # a tile is two queries
    ],
)
def test_hopper_prompts(heads: tuple[int, int], dim: int, page_size: int, window: int | None, sinks: bool) -> None:
    """One less, just, and one more than a tile or a block of keys; rows that decode beside them; poisoned pages."""
    args = _example("", EDGES, heads, dim, page_size, window, sinks=sinks).make(Inputs(WHERE, seed=11))
    for config in VARLEN_SM90.space.configs(DEVICE, paged_attention_op.problem(*args)):
        conformance.check(paged_attention_op, VARLEN_SM90, config, args)


@pytest.mark.skipif(not HOPPER, reason="Gluon for sm_90 runs on no other card, and not in Triton's interpreter")
@pytest.mark.parametrize(("dim", "window"), [(128, None), (64, 100)])
def test_hopper_rows_do_not_depend_on_their_batch(dim: int, window: int | None) -> None:
    """As the next test, by the kernel that Hopper has in the invariant scope, with several blocks of keys."""
    q, k, v, table, lens, cu, longest, *rest = _example("", ((3, 9), (300, 700), (1, 70)), (4, 2), dim, window=window).make(
        Inputs(WHERE, seed=12)
    )
    config = INVARIANT_SM90.space.default(DEVICE, paged_attention_op.problem(q, k, v, table, lens, cu, longest, *rest))
    whole = INVARIANT_SM90.launch(config, q, k, v, table, lens, cu, longest, *rest)[3:303]
    ends = (0, 64, 65, 100, 299, 300)
    for a, b in pairwise(ends):
        own, held = (torch.tensor(x, dtype=torch.int32, device=WHERE) for x in ([0, b - a], [400 + b]))
        part = INVARIANT_SM90.launch(config, q[3 + a : 3 + b], k, v, table[1:2], held, own, b - a, *rest)
        assert torch.equal(part, whole[a:b])


@pytest.mark.skipif(DEVICE.kind != "cuda", reason="a CUDA graph is captured on a GPU alone")
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("format", ["", "int8"])
@pytest.mark.parametrize("impl", ["stream", "sm90", "varlen", "varlen_sm90"])
def test_a_captured_launch_follows_lengths_and_pages(impl: str, format: str, queries: int) -> None:
    """Captured once and replayed with others of both: the bits of a launch of its own."""
    example = _example("", ((queries, 700), (queries, 5), (queries, 64)), (8, 2), 128, 64, format=format)
    args: list[Any] = list(example.make(Inputs(WHERE, seed=14)))
    args = [torch.nan_to_num(t) if isinstance(t, Tensor) and t.is_floating_point() else t for t in args]
    problem = paged_attention_op.problem(*args)
    if reason := IMPLS[impl].refusal(DEVICE, problem):
        pytest.skip(reason)
    config = IMPLS[impl].space.default(DEVICE, problem)
    before = IMPLS[impl].launch(config, *args).clone()  # compiled here: nothing may be while a graph is captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = IMPLS[impl].launch(config, *args)
    for lengths in ([9, 640, 0], [700, 700, 65], [queries, 64, 700]):
        args[4].copy_(torch.tensor(lengths))
        args[3].copy_(args[3].flip(0, 1))
        graph.replay()
        assert torch.equal(got, IMPLS[impl].launch(config, *args))
        assert not torch.equal(got, before)
        before = got.clone()


@needs_triton
@pytest.mark.parametrize("format", ["", "int8", "fp8"])
def test_a_row_does_not_depend_on_its_batch(format: str) -> None:
    """Alone, beside others, prefilled in chunks, and as the last token decoded: the same bits."""
    q, k, v, table, lens, cu, _, scale, window, k_scale, v_scale, sinks = _example(
        "", ((40, 100), (3, 9), (1, 70)), (2, 1), 16, format=format
    ).make(Inputs(WHERE, seed=5))

    def attend(rows: Tensor, sequence: Any, lengths: list[int], counts: list[int]) -> Tensor:
        ends = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32, device=WHERE)
        held = torch.tensor(lengths, dtype=torch.int32, device=WHERE)
        longest = max(counts)
        with invariant():
            return ops.paged_attention(rows, k, v, table[sequence], held, ends, longest, scale, window, k_scale, v_scale, sinks)

    together = attend(q, slice(None), lens.tolist(), cu.diff().tolist())
    assert torch.equal(attend(q[:40], slice(0, 1), [100], [40]), together[:40])
    chunks = [attend(q[:25], slice(0, 1), [85], [25]), attend(q[25:40], slice(0, 1), [100], [15])]
    assert torch.equal(torch.cat(chunks), together[:40])
    assert torch.equal(attend(q[39:40], slice(0, 1), [100], [1]), together[39:40])


@pytest.mark.parametrize(("format", "least_cosine", "most_error"), [("int8", 0.9999, 0.05), ("fp8", 0.999, 0.2)])
def test_codes_cost_little_accuracy(format: str, least_cosine: float, most_error: float) -> None:
    """Against a cache of bf16: the cosine of all results, and the largest error in units of their RMS."""
    make = _example("", ((1, 300), (1, 100)), (2, 1), 64).make
    q, k, v, *rest = make(Inputs("cpu", seed=6))
    k, v = (torch.nan_to_num(cache) for cache in (k, v))
    plain = ops.paged_attention(q, k, v, *rest[:6]).float()
    (k_codes, k_scale, _), (v_codes, v_scale, _) = encode(k, format), encode(v, format)
    quantized = ops.paged_attention(
        q, k_codes, v_codes.mT.contiguous(), *rest[:6], k_scale=k_scale.squeeze(-1), v_scale=v_scale.squeeze(-1)
    ).float()
    assert F.cosine_similarity(plain.flatten(), quantized.flatten(), 0) > least_cosine
    assert (plain - quantized).abs().max() / plain.square().mean().sqrt() < most_error


@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_what_is_written_is_read(format: str) -> None:
    """Tokens written to a cache of codes, one by one and many at once, are attended to as their numbers are."""
    x = Inputs("cpu", seed=7)
    k, v = (x.randn(20, 2, 32) for _ in range(2))
    dtype = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}[format]
    k_cache, v_cache = torch.zeros(3, 2, 16, 32).to(dtype), torch.zeros(3, 2, 32, 16).to(dtype)
    k_scale, v_scale = torch.full((3, 2, 16), torch.nan), torch.full((3, 2, 16), torch.nan)
    slots = torch.arange(32, 52) % 48  # page 2, then page 0
    for part in (slice(0, 19), slice(19, 20)):
        ops.kv_cache_write(k[part], v[part], k_cache, v_cache, slots[part], k_scale, v_scale)
    table, lens, cu = (torch.tensor(t, dtype=torch.int32) for t in ([[2, 0]], [20], [0, 1]))
    q = x.randn(1, 4, 32)
    got = ops.paged_attention(q, k_cache, v_cache, table, lens, cu, 1, 0.2, None, k_scale, v_scale)
    want = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], scale=0.2, enable_gqa=True
    )[0].transpose(0, 1)
    assert (got - want).abs().max() < (0.02 if format == "int8" else 0.1) * want.abs().max()


# ---- which implementation


@pytest.mark.parametrize(
    ("dims", "arch", "chosen"),
    [
        ({}, 90, "sm90"),
        ({"Q": 4}, 90, "sm90"),
        ({"cache": "int8"}, 90, "sm90"),
        ({"cache": "fp8", "Q": 16, "S": 64}, 90, "sm90"),
        ({"D": 256}, 90, "stream"),
        ({"H": 64, "G": 2, "Q": 4}, 90, "varlen_sm90"),  # more rows than either has
        ({"Q": 300}, 90, "varlen_sm90"),
        ({"Q": 300, "cache": "int8"}, 90, "varlen"),
        ({}, 80, "stream"),
        ({}, 100, "stream"),
    ],
    ids=str,
)
def test_what_is_taken_unmeasured(dims: dict[str, Any], arch: int, chosen: str) -> None:
    assert paged_attention_op.make is not None
    problem = paged_attention_op.problem(*paged_attention_op.make(Inputs("cpu"), B=2, KV=400, **dims))
    assert paged_attention_op.choose(CARD_OF_ARCH[arch], problem).impl.name == chosen


def test_refusals() -> None:
    make: Any = paged_attention_op.make
    for dims, words in (({"Q": 17}, "at most 16 queries"), ({"Q": 9, "G": 1, "H": 64}, "not 1024")):
        problem = paged_attention_op.problem(*make(Inputs("meta"), B=1, KV=64, **dims))
        reason = STREAM.refusal(CARD_OF_ARCH[90], problem)
        assert reason is not None
        assert words in reason
        assert IMPLS["varlen"].refusal(CARD_OF_ARCH[90], problem) is None


@pytest.mark.parametrize(
    ("dims", "found"),
    [
        ({"S": 16}, {8, 64}),
        ({"S": 32}, {8, 16, 64}),
        ({"S": 64}, {8, 16, 64}),
        ({"S": 256}, {8, 16, 64}),
        ({"S": 64, "cache": "int8"}, {64}),
    ],
    ids=str,
)
def test_boxes_no_larger_than_pages(dims: dict[str, Any], found: set[int]) -> None:
    """Smaller ones fetch less behind a sequence's end: taken where a page is larger, and a box is rows of it."""
    make: Any = paged_attention_op.make
    problem = paged_attention_op.problem(*make(Inputs("meta"), B=256, KV=300, **dims))
    assert {config["BOX"] for config in SM90.space.configs(CARD_OF_ARCH[90], problem)} == found
    assert SM90.space.default(CARD_OF_ARCH[90], problem)["BOX"] == min(found)


@pytest.mark.parametrize(
    ("dims", "programs"),
    [
        ({"B": 1}, 1),
        ({"B": 16}, 1),
        ({"B": 32}, 1),
        ({"B": 64}, 2),
        ({"B": 256}, 2),
        ({"B": 256, "G": 1}, 1),
        ({"B": 64, "Q": 4}, 1),
        ({"B": 1, "cache": "int8"}, 2),
        ({"B": 64, "Q": 16, "cache": "int8"}, 1),
        ({"B": 1, "D": 64}, 2),
    ],
    ids=str,
)
def test_programs_of_an_sm(dims: dict[str, Any], programs: int) -> None:
    """Two where hardly a pair of a sequence and a head is shared, as they were measured to be faster on an H100."""
    make: Any = paged_attention_op.make
    problem = paged_attention_op.problem(*make(Inputs("meta"), KV=300, **dims))
    assert SM90.space.default(CARD_OF_ARCH[90], problem)["PER_SM"] == programs
