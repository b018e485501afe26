"""Latent attention: every tile and every number of ranges against the definition, rows alone and in a batch, and its errors."""

from itertools import pairwise
from typing import Any

import pytest
import torch

from tests import conformance
from tilewright import ops
from tilewright.hw.device import device_named, device_of
from tilewright.kernels.attention.mla.attention import EXAMPLES, mla_attention_op
from tilewright.kernels.attention.mla.problem import Problem
from tilewright.kernels.attention.mla.rope_cache_write import EXAMPLES as WRITES
from tilewright.kernels.attention.mla.sm90 import SM90
from tilewright.kernels.attention.mla.tile import INVARIANT, SPACE, TRITON, combine_splits
from tilewright.op import Inputs

DEVICE = device_of(-1)
INTERPRETED = pytest.mark.skipif(DEVICE.kind != "interpret", reason="runs kernels: TRITON_INTERPRET=1, or test_ops.py on a GPU")
BY_LABEL = {example.label: example for example in EXAMPLES}
CONFIGS = [
    {"BLOCK_M": m, "BLOCK_N": n, "SPLITS": splits, "num_warps": 4, "num_stages": 2}
    for m, n, splits in ((16, 16, 1), (16, 32, 2), (32, 16, 5), (64, 64, 1), (64, 16, 6), (32, 32, 4))
]


@INTERPRETED
@pytest.mark.parametrize("label", ["decode", "mixed"])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: "{BLOCK_M}x{BLOCK_N} in {SPLITS}".format(**c))
def test_every_tile(label: str, config: dict[str, int]) -> None:
    """Lengths of 0 and 1, tiles that end inside a page, ranges without keys, NaN behind every sequence's end."""
    conformance.check(mla_attention_op, TRITON, config, BY_LABEL[label].make(Inputs()))


@INTERPRETED
def test_invariant_rows_do_not_depend_on_the_batch() -> None:
    """Each sequence alone, and a prompt's last token as a step of its own, give the bits of the batch."""
    q, cache, table, lens, cu_q, longest, rank, scale = BY_LABEL["mixed"].make(Inputs())
    config = INVARIANT.space.default(DEVICE, mla_attention_op.problem(q, cache, table, lens, cu_q, longest, rank, scale))
    whole = INVARIANT.launch(config, q, cache, table, lens, cu_q, longest, rank, scale)
    for b, (first, end) in enumerate(pairwise(cu_q.tolist())):
        for start in {first, max(first, end - 1)}:
            count = end - start
            alone = (q[start:end], cache, table[b : b + 1], lens[b : b + 1], torch.tensor([0, count], dtype=torch.int32))
            got = INVARIANT.launch(config, *alone, count, rank, scale)
            assert torch.equal(got, whole[start:end]), (b, start)


@INTERPRETED
@pytest.mark.parametrize("splits", [2, 4, 5, 17, 64])
@pytest.mark.parametrize("rank", [512, 80])
def test_parts_are_averaged_by_their_sums(splits: int, rank: int) -> None:
    """Against float64; a row whose first range had no keys, and one without any: what such ranges left is not read."""
    x = Inputs(seed=3)
    part, lse = x.randn(1, 3, splits, rank, dtype=torch.float32), 4 * x.randn(1, 3, splits, dtype=torch.float32)
    for nothing in ((0, 1, 0), (0, 2)):
        part[nothing], lse[nothing] = torch.nan, -torch.inf
    got = torch.full((1, 3, rank), torch.nan)
    combine_splits(part, lse, got)
    weights = torch.exp2(lse.double())
    want = (weights[..., None] * torch.nan_to_num(part).double()).sum(2) / weights.sum(2, keepdim=True)
    assert (got[:, :2] - want[:, :2]).abs().max() < 1e-5
    assert not got[:, 2].any()


@INTERPRETED
@pytest.mark.parametrize("splits", [2, 64])
def test_parts_of_16_bits(splits: int) -> None:
    """The same of float16 with a scale for each half, woven; a part's numbers may be larger than float16's."""
    x = Inputs(seed=4)
    part, lse = x.randn(1, 3, splits, 512, dtype=torch.float32) * 1e6, 4 * x.randn(1, 3, splits, dtype=torch.float32)
    part[0, 1, 0], lse[0, 1, 0] = torch.nan, -torch.inf
    halves = part.unflatten(-1, (2, 256))
    scales = halves.abs().amax(-1)
    stored = (halves / scales[..., None]).to(torch.float16)
    woven = stored.unflatten(-1, (16, 2, 4, 2)).transpose(-3, -2).reshape(part.shape).contiguous()
    got = torch.full((1, 3, 512), torch.nan)
    combine_splits(woven, lse, got, scales)
    weights = torch.exp2(lse.double())
    exact = torch.nan_to_num((stored.double() * scales[..., None]).view(part.shape))
    want = (weights[..., None] * exact).sum(2) / weights.sum(2, keepdim=True)
    assert (got - want).abs().max() < 1e-5 * 1e6


def problem(**changes: Any) -> Problem:
    sizes = {"dtype": torch.bfloat16, "heads": 128, "rank": 512, "rotated": 64, "page_size": 64}
    return Problem(**{**sizes, "batch": 8, "queries": 1, "keys": 4096, **changes})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"dtype": torch.float32}, "supports bf16 and fp16 only, not torch.float32"),
        ({"rank": 256}, "supports latents of 512 + 64 numbers only, not 256 + 64"),
        ({"page_size": 16}, "needs a page size that is a multiple of 64 tokens, not 16"),
        ({"page_size": 128, "heads": 20}, None),
    ],
)
def test_what_sm90_takes(changes: dict[str, Any], reason: str | None) -> None:
    assert SM90.refusal(device_named("h100"), problem(**changes)) == reason


def test_ranges_fill_the_card() -> None:
    """Few sequences are split, many are not, and none below a tile of keys."""
    card = device_named("h100")
    splits = {b: SM90.space.default(card, problem(batch=b))["SPLITS"] for b in (1, 16, 64, 256)}
    assert splits[1] >= 16
    assert 2 * 16 * splits[16] >= 0.9 * card.sms
    assert splits[256] <= 2
    assert SM90.space.default(card, problem(batch=1, keys=64)) == {"SPLITS": 1}
    assert SM90.space.default(card, problem(batch=1, queries=0)) == {"SPLITS": 1}


@pytest.mark.parametrize("card", ["a100-80gb", "h100", "rtx-4090"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_default_tiles_fit_the_card(card: str, dtype: torch.dtype) -> None:
    device = device_named(card)
    config = SPACE.default(device, problem(dtype=dtype))
    assert SPACE.refusal(device, problem(dtype=dtype), config) is None


def arguments() -> dict[str, Any]:
    q, cache, table, lens, cu_q, longest, rank, scale = BY_LABEL["few"].make(Inputs())
    return {
        "q": q, "cache": cache, "block_table": table, "kv_lens": lens, "cu_q": cu_q, "max_q_len": longest, "rank": rank,
        "scale": scale,
    }  # fmt: skip


REFUSED: dict[str, tuple[Any, str]] = {
    "dims": (lambda a: {"q": a["q"][0]}, r"needs q \[T, H, R \+ E\] and cache"),
    "width": (lambda a: {"q": a["q"][..., :40]}, r"got \(5, 16, 40\), \(\d+, 64, 48\) and rank 32"),
    "rank": (lambda a: {"rank": 48}, "and rank 48"),
    "dtype": (lambda a: {"q": a["q"].float()}, "q is torch.float32 on cpu, the cache torch.bfloat16 on cpu"),
    "strides": (lambda a: {"q": a["q"].transpose(0, 1).contiguous().transpose(0, 1)}, "needs contiguous q and cache"),
    "cu_q": (lambda a: {"cu_q": a["cu_q"][:2]}, r"for kv_lens \[2\], cu_q must be one longer"),
    "table": (lambda a: {"block_table": a["block_table"][:1]}, "block_table must have as many rows"),
    "one query": (lambda a: {"max_q_len": 1}, "max_q_len 1 needs one query per sequence; got 5 queries for 2 sequences"),
    "queries": (lambda a: {"max_q_len": 2}, "max_q_len is 2, but sequence 0 has 3 queries"),
    "no longest": (lambda a: {"max_q_len": 0}, "max_q_len is 0 for 5 queries"),
    "scale": (lambda a: {"scale": 0.0}, "scale is 0.0, wanted a finite number above 0"),
    "float64": (lambda a: {"q": a["q"].double(), "cache": a["cache"].double()}, "q is torch.float64, wanted bfloat16, float16"),
    "int64": (lambda a: {"kv_lens": a["kv_lens"].long()}, "must be int32; got torch.int32, torch.int64, torch.int32"),
    "device": (lambda a: {"block_table": a["block_table"].to("meta")}, "q on cpu, block_table on meta, kv_lens on cpu"),
    "gaps": (lambda a: {"kv_lens": a["kv_lens"].repeat_interleave(2)[::2]}, "contiguous kv_lens and cu_q; got strides"),
    "room": (lambda a: {"block_table": a["block_table"][:, :1].contiguous()}, "sequence 0 has 100 tokens, .* 1 pages for 64"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=list(REFUSED))
def test_attention_refuses(change: Any, message: str) -> None:
    given = arguments()
    with pytest.raises(ValueError, match=message):
        ops.mla_attention(**{**given, **change(given)})


WRITE_REFUSED: dict[str, tuple[int, Any, str]] = {
    "heads": (1, lambda t: t[:, :1], r"needs lead \[T, H, L\] and turned \[T, H, E\]"),
    "kv": (2, lambda t: t[:, 1:], r"needs kv \[T, R \+ E\] and cache"),
    "slots": (7, lambda t: t[1:], "needs a position and a slot for each of 5 tokens"),
    "angles": (5, lambda t: t[..., 1:], "cos_sin must be contiguous"),
    "dtype": (6, lambda t: t.float(), "must have one dtype"),
    "strides": (0, lambda t: t.mT.contiguous().mT, "dense last dims"),
}


@pytest.mark.parametrize(("place", "change", "message"), WRITE_REFUSED.values(), ids=list(WRITE_REFUSED))
def test_write_refuses(place: int, change: Any, message: str) -> None:
    args = list(next(example for example in WRITES if example.label == "padded").make(Inputs()))
    args[place] = change(args[place])
    with pytest.raises(ValueError, match=message):
        ops.mla_rope_write(*args[:8], eps=args[8], interleaved=args[9])
