"""What paged attention refuses, and that no kernel leaves the cache for lengths, pages, queries or slots that are wrong."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.test_paged_attention import DEVICE, HOPPER, IMPLS, WHERE, few_programs, needs_triton, ops_by_name, small
from tilewright import ops
from tilewright.kernels.attention.paged.attention import _example, paged_attention_op
from tilewright.op import Inputs

__all__ = ["few_programs"]

GOOD = _example("", ((1, 20), (1, 3)), (4, 2), 16).make(Inputs("cpu"))
QUANTIZED = _example("", ((1, 20), (1, 3)), (4, 2), 32, format="int8").make(Inputs("cpu"))


@pytest.mark.parametrize(
    ("args", "changes", "words"),
    [
        (GOOD, {0: GOOD[0][..., :8]}, "caches [P, G, S, D] with one D"),
        (GOOD, {0: GOOD[0][:, :3]}, "3 query heads are not a multiple of 2"),
        (GOOD, {1: GOOD[1].half()}, "dtypes differ"),
        (GOOD, {0: GOOD[0].mT.contiguous().mT}, "dense heads and contiguous caches"),
        (GOOD, {8: 0}, "window must be at least 1"),
        (GOOD, {5: GOOD[5][:-1]}, "cu_q must be one longer"),
        (GOOD, {3: GOOD[3].T.contiguous().T}, "dense rows in block_table"),
        (GOOD, {4: GOOD[4].to("meta")}, "all tensors must be on one device"),
        (GOOD, {3: GOOD[3][:, :1].contiguous()}, "sequence 0 has 20 tokens, but its block_table row 1 pages for 16"),
        (GOOD, {4: torch.tensor([20, 33], dtype=torch.int32)}, "sequence 1 has 33 tokens, but its block_table row 2 pages"),
        (GOOD, {4: torch.tensor([-1, 3], dtype=torch.int32)}, "sequence 0 has -1 tokens"),
        (GOOD, {3: GOOD[3] + 3}, "the cache has pages 0 to 3"),
        (GOOD, {3: GOOD[3] - 9}, "sequence 0 of 20 tokens needs the pages block_table[0, :2]; entry 0 is"),
        (GOOD, {5: torch.tensor([0, 2, 3], dtype=torch.int32)}, "cu_q must rise from 0 to 2"),
        (QUANTIZED, {5: torch.tensor([0, 2, 1], dtype=torch.int32)}, "cu_q must rise from 0 to 2"),
        (GOOD, {3: GOOD[3].long()}, "must be int32; got torch.int64, torch.int32, torch.int32"),
        (GOOD, {4: GOOD[4].float()}, "must be int32; got torch.int32, torch.float32, torch.int32"),
        (GOOD, {4: GOOD[4].repeat_interleave(2)[::2]}, "contiguous kv_lens and cu_q; got strides (2, 1), (2,), (1,)"),
        (
            GOOD,
            {3: GOOD[3][0]},
            "for kv_lens [2], cu_q must be one longer, and block_table must have as many rows; got (3,) and (2,)",
        ),
        (GOOD, {5: torch.tensor([0, 2, 2], dtype=torch.int32)}, "max_q_len is 1, but sequence 0 has 2 queries"),
        (GOOD, {6: 0}, "max_q_len is 0 for 2 queries"),
        (GOOD, {7: 0.0}, "scale is 0.0, wanted a finite number above 0"),
        (GOOD, {7: -0.2}, "scale is -0.2, wanted a finite number above 0"),
        (GOOD, {i: GOOD[i].double() for i in range(3)}, "q is torch.float64, wanted bfloat16, float16 or float32"),
        (GOOD, {i: torch.zeros(2, 2, 16, 264)[(0,) * (not i)] for i in range(3)}, "head dim is 264, wanted 1 to 256"),
        (GOOD, {i: GOOD[i][:, :0] for i in (1, 2)}, "4 query heads are not a multiple of 0"),
        (
            QUANTIZED,
            {i: QUANTIZED[i].float().to(torch.float8_e5m2) for i in (1, 2)},
            "caches torch.float8_e5m2, torch.float8_e5m2; wanted",
        ),
        (GOOD, {11: torch.zeros(3)}, "sinks must be [4]"),
        (GOOD, {11: torch.zeros(8)[::2]}, "sinks must be [4], one per query head, contiguous"),
        (GOOD, {11: torch.zeros(4).int()}, "got (4,) torch.int32 on cpu"),
        (GOOD, {11: torch.zeros(4, device="meta")}, "got (4,) torch.float32 on meta"),
        (GOOD, {9: torch.zeros(3)}, "with k_scale given and v_scale absent"),
        (QUANTIZED, {10: None}, "int8 and float8_e4m3fn need both"),
        (QUANTIZED, {9: QUANTIZED[9].half()}, "k_scale must be"),
        (QUANTIZED, {2: QUANTIZED[2].mT.contiguous()}, "values in codes [P, G, D, S]"),
    ],
)
def test_bad_input(args: Any, changes: dict[int, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        ops.paged_attention(*(changes.get(i, a) for i, a in enumerate(args)))


@pytest.mark.parametrize("sequences", [0, 2])
def test_no_queries(sequences: int) -> None:
    """An empty batch, and one in which nobody brings a query."""
    q, k, v, table, lens, *_ = (t.to(WHERE) if isinstance(t, Tensor) else t for t in GOOD)
    ends = torch.zeros(sequences + 1, dtype=torch.int32, device=WHERE)
    assert ops.paged_attention(q[:0], k, v, table[:sequences], lens[:sequences], ends, 0, 0.2).shape == (0, 4, 16)


WRONG: dict[str, Any] = {
    "lengths": lambda table, lens, cu: (table, lens + 1000, cu),
    "pages": lambda table, lens, cu: (table * 7919 - 3, lens, cu),
    "queries": lambda table, lens, cu: (table, lens, cu * 5 - 2),
}


def padded(t: Tensor) -> tuple[Tensor, Tensor]:
    """(t as a view inside a larger buffer, the buffer), of NaN, or of a page number far away."""
    filled: Any = torch.nan if t.is_floating_point() else 99 if t.dtype == torch.int32 else -128
    wide = t.new_full((t.numel() + 512,), filled)
    wide[256 : 256 + t.numel()] = t.flatten()
    return wide[256 : 256 + t.numel()].view(t.shape), wide


@needs_triton
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("impl", ["stream", "varlen"])
@pytest.mark.parametrize("queries", [1, 3])
def test_never_outside_the_cache(wrong: str, impl: str, queries: int) -> None:
    """Lengths, pages and queries that are wrong: all that is read is finite, and nothing beside the result is written."""
    if queries == 1 and wrong == "queries":
        pytest.skip("cu_q is not read where each sequence has one query")
    example = _example("", ((queries, 40), (1, 16)), (2, 1), 16, dtype=torch.float32)
    q, k, v, table, lens, cu, longest, *rest = example.make(Inputs(WHERE, seed=8))
    (q, _), (k, _), (v, _) = (padded(torch.nan_to_num(t)) for t in (q, k, v))
    (table, _), (lens, _), (cu, _) = (padded(t) for t in WRONG[wrong](table, lens, cu))
    if wrong == "pages":  # what lies in the table's row counts, not what lies behind it
        lens = lens.clamp(max=16 * table.shape[1])
    problem = paged_attention_op.problem(q, k, v, table, lens, cu, longest, *rest)
    config = small() if impl == "stream" else IMPLS[impl].space.default(DEVICE, problem)
    got = IMPLS[impl].launch(config, q, k, v, table, lens, cu, longest, *rest)
    if wrong == "lengths":
        # As long as the table's rows are, which end with page 0.
        room = torch.full_like(lens, 16 * table.shape[1])
        assert torch.equal(got, IMPLS[impl].launch(config, q, k, v, table, room, cu, longest, *rest))
    if wrong != "queries":  # whose rows nobody may own
        assert got.isfinite().all()


@pytest.mark.skipif(not HOPPER, reason="Gluon for sm_90 runs on no other card, and not in Triton's interpreter")
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize(("impl", "format"), [("sm90", ""), ("sm90", "int8"), ("varlen_sm90", ""), ("invariant_sm90", "")])
@pytest.mark.parametrize("queries", [1, 3])
def test_hopper_never_outside_the_cache(wrong: str, impl: str, format: str, queries: int) -> None:
    """As the test before; for compute-sanitizer too, with PYTORCH_NO_CUDA_MEMORY_CACHING=1."""
    if queries == 1 and wrong == "queries":
        pytest.skip("cu_q is not read where each sequence has one query")
    q, k, v, table, lens, cu, longest, scale, window, *scales, sinks = _example(
        "", ((queries, 40), (1, 16)), (4, 1), 64, format=format
    ).make(Inputs(WHERE, seed=8))
    (q, _), (k, _), (v, _) = (padded(torch.nan_to_num(t) if t.is_floating_point() else t) for t in (q, k, v))
    scales = [None if t is None else torch.nan_to_num(t, 1.0) for t in scales]
    (table, _), (lens, _), (cu, _) = (padded(t) for t in WRONG[wrong](table, lens, cu))
    if wrong == "pages":
        lens = lens.clamp(max=16 * table.shape[1])
    rest = (table, cu, longest, scale, window, *scales, sinks)

    def run(held: Tensor) -> Tensor:
        args = (q, k, v, rest[0], held, *rest[1:])
        return IMPLS[impl].launch(IMPLS[impl].space.default(DEVICE, paged_attention_op.problem(*args)), *args)

    got = run(lens)
    if wrong == "lengths":
        assert torch.equal(got, run(torch.full_like(lens, 16 * table.shape[1])))
    if wrong != "queries":
        assert got.isfinite().all()


@needs_triton
def test_slots_outside_the_cache_are_not_written() -> None:
    k = Inputs(WHERE, seed=9).randn(4, 2, 16)
    (k_cache, beside), (v_cache, _) = (padded(torch.zeros(3, 2, 16, 16, device=WHERE)) for _ in range(2))
    slots = torch.tensor([48, 47, 1 << 33, -5], device=WHERE)
    op = ops_by_name["kv_cache_write"]
    op.impls[0].launch({"BLOCK_H": 2, "num_warps": 4}, k, k, k_cache, v_cache, slots, None, None)
    assert torch.equal(k_cache[2, :, 15], k[1])
    assert k_cache.count_nonzero() == k[1].count_nonzero()
    assert beside[:256].isnan().all()
    assert beside[-256:].isnan().all()


def test_what_is_wrong_is_named() -> None:
    table, lens = torch.tensor([[0, 1], [2, 9]], dtype=torch.int32), torch.tensor([30, 16], dtype=torch.int32)
    ops.check_paged(table, lens, page_size=16, pages=3, slots=torch.tensor([47, -1]))  # page 9 is not needed
    for changes, words in (
        ({"kv_lens": lens + 3}, "sequence 0 has 33 tokens, but its block_table row 2 pages for 32"),
        ({"kv_lens": lens + 1}, "entry 1 is 9, but the cache has pages 0 to 2"),
        ({"slots": torch.tensor([3, 48])}, "token 1 has slot 48, but the cache has slots 0 to 47"),
        ({"cu_q": torch.tensor([0, 31, 32], dtype=torch.int32)}, "sequence 0 has 31 queries but only 30 tokens"),
        ({"cu_q": torch.tensor([0, 1, 2], dtype=torch.int32), "tokens": 3}, "must rise from 0 to 3"),
    ):
        args: dict[str, Any] = {"block_table": table, "kv_lens": lens, "page_size": 16, "pages": 3, **changes}
        with pytest.raises(ValueError, match=re.escape(words)):
            ops.check_paged(args.pop("block_table"), args.pop("kv_lens"), **args)


@pytest.mark.parametrize(("cache", "words"), [(torch.int8, "need k_scale"), (torch.float16, "must have the caches' dtypes")])
def test_writes_that_do_not_fit(cache: torch.dtype, words: str) -> None:
    k = torch.zeros(2, 2, 32)
    k_cache = torch.zeros(3, 2, 16, 32, dtype=cache)
    v_cache = k_cache.mT.contiguous() if cache == torch.int8 else k_cache
    with pytest.raises(ValueError, match=words):
        ops.kv_cache_write(k, k, k_cache, v_cache, torch.zeros(2, dtype=torch.int64))


def test_a_slot_beyond_the_cache() -> None:
    k, cache = torch.zeros(2, 2, 32), torch.zeros(3, 2, 16, 32)
    with pytest.raises(ValueError, match="token 1 has slot 48, but the cache has slots 0 to 47"):
        ops.kv_cache_write(k, k, cache, cache.clone(), torch.tensor([0, 48]))
