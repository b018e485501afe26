"""Windows, prefixes, caps, sinks, ALiBi and narrow values: against a definition by loops, every head dim with every mask."""

import math
import re
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import conformance
from tilewright import ops
from tilewright.hw.device import CARDS, device_of
from tilewright.kernels.attention.attention import attention_example, attention_op
from tilewright.kernels.attention.sm90 import SM90
from tilewright.kernels.attention.tile import TRITON
from tilewright.op import Inputs, invariant

DEVICE = device_of(0 if torch.cuda.is_available() else -1)
WHERE = "cuda" if DEVICE.kind == "cuda" else "cpu"
needs_triton = pytest.mark.skipif(not DEVICE.runs_triton, reason="no GPU here: run with TRITON_INTERPRET=1")

# ---- the public function, against loops

OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"causal": True, "window": 3},
    "window of one": {"causal": True, "window": 1},
    "window of both sides": {"window": 2},
    "left and right": {"window": (1, 4)},
    "left alone": {"window": (2, None)},
    "right alone": {"window": (None, 0)},
    "window as wide as all": {"causal": True, "window": 1000},
    "prefix": {"causal": True, "prefix": 4},
    "prefix of nothing": {"causal": True, "prefix": 0},
    "prefix beyond the keys": {"causal": True, "prefix": 1000},
    "prefix of each": {"causal": True, "prefix": [0, 5]},
    "prefix in a window": {"causal": True, "window": 4, "prefix": 7},
    "cap": {"softcap": 0.7},
    "sinks": {"causal": True, "sinks": True},
    "slopes": {"alibi_slopes": True},
    "slopes, causal": {"causal": True, "alibi_slopes": True, "scale": 0.3},
    "all of it": {"causal": True, "window": (3, 0), "prefix": 2, "softcap": 2.0, "sinks": True, "alibi_slopes": True},
}


def sees(own: int, key: int, options: dict[str, Any], sequence: int) -> bool:
    """Whether the query whose key is `own` sees `key`."""
    causal, window, prefix = options.get("causal", False), options.get("window"), options.get("prefix", 0)
    prefix = prefix[sequence] if isinstance(prefix, list) else prefix
    if isinstance(window, int):
        window = (window - 1, window - 1)
    left, right = (None, None) if window is None else window
    if left is not None and own - key > left:
        return False
    if causal:
        return key <= own or key < prefix
    return right is None or key - own <= right


def by_loops(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(out, lse) in float64, one query and one head at a time."""
    out, lse = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64), torch.empty(q.shape[0], q.shape[2], q.shape[1])
    shared = q.shape[2] // k.shape[2]
    scale, cap = options.get("scale", q.shape[3] ** -0.5), options.get("softcap")
    for b, i, h in product(range(q.shape[0]), range(q.shape[1]), range(q.shape[2])):
        own = i + k.shape[1] - q.shape[1]
        scores, values = [], []
        for j in range(k.shape[1]):
            if not sees(own, j, options, b):
                continue
            score = float(q[b, i, h].double() @ k[b, j, h // shared].double()) * scale
            score = score if cap is None else cap * math.tanh(score / cap)
            if "alibi_slopes" in options:
                score -= float(options["alibi_slopes"][h]) * abs(own - j)
            scores.append(score)
            values.append(v[b, j, h // shared].double())
        if "sinks" in options:
            scores.append(float(options["sinks"][h]))
            values.append(torch.zeros(v.shape[3], dtype=torch.float64))
        lse[b, h, i] = torch.tensor(scores, dtype=torch.float64).logsumexp(0) if scores else -math.inf
        for score, value in zip(scores, values, strict=True):
            out[b, i, h] += math.exp(score - float(lse[b, h, i])) * value
    return out, lse


@pytest.mark.parametrize(("rows", "keys"), [(4, 9), (6, 3)])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_matches_loops(options: dict[str, Any], rows: int, keys: int) -> None:
    inputs, options = Inputs("cpu"), dict(options)
    q, k, v = inputs.randn(2, rows, 2, 8), inputs.randn(2, keys, 1, 8), inputs.randn(2, keys, 1, 6)
    if "sinks" in options:
        options["sinks"] = inputs.randn(2)
    if "alibi_slopes" in options:
        options["alibi_slopes"] = torch.tensor([0.5, 0.1])
    want, want_lse = by_loops(q, k, v, options)
    given: dict[str, Any] = {name: x.to(WHERE) if isinstance(x, Tensor) else x for name, x in options.items()}
    if isinstance(given.get("prefix"), list):
        given["prefix"] = torch.tensor(given["prefix"], dtype=torch.int32, device=WHERE)
    q, k, v = q.to(WHERE), k.to(WHERE), v.to(WHERE)
    out, lse = ops.attention(q, k, v, return_lse=True, **given)
    torch.testing.assert_close(out.cpu(), want.float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.cpu(), want_lse.float(), rtol=1e-4, atol=1e-5)
    cu: list[Any] = [torch.tensor([0, n, 2 * n], dtype=torch.int32, device=WHERE) for n in (rows, keys)]
    flat = (t.flatten(0, 1) for t in (q, k, v))
    packed = ops.attention(*flat, cu_q=cu[0], cu_k=cu[1], max_q=rows, max_k=keys, **given)
    assert isinstance(packed, Tensor)
    torch.testing.assert_close(packed.view_as(out), out, rtol=1e-5, atol=1e-5)


# ---- the portable kernel, every head dim with every mask

HEAD_DIMS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256))
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "left": 20},
    "both sides": {"left": 11, "right": 30},
    "prefix": {"causal": True, "prefix": 37},
    "cap": {"softcap": 8.0},
    "sinks": {"causal": True, "left": 40, "sinks": True},
    "alibi": {"causal": True, "alibi": True},
}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEADS = ((1, 1), (2, 1), (3, 1))


def matrix() -> list[Any]:
    """Every head dim with every mask; dtypes and groups of heads in turn, so that each meets each of the others."""
    found = []
    for (i, dims), (j, mask) in product(enumerate(HEAD_DIMS), enumerate(MASKS)):
        dtype, heads = DTYPES[(i + j) % 3], HEADS[(2 * i + j + j // 3) % 3]
        label = f"{dims[0]}/{dims[1]}-{mask}-{str(dtype).removeprefix('torch.')}-{heads[0]}/{heads[1]}"
        found.append(pytest.param(dims, mask, dtype, heads, id=label))
    return found


@needs_triton
@pytest.mark.parametrize(("dims", "mask", "dtype", "heads"), matrix())
def test_every_head_dim_with_every_mask(
    dims: tuple[int, int], mask: str, dtype: torch.dtype, heads: tuple[int, int]
) -> None:  # fmt: skip
    lengths = ((40, 70), (0, 3), (9, 4)) if "prefix" in MASKS[mask] or mask == "sinks" else ((40, 70),)
    example = attention_example(
        "", lengths, heads, dims[0], dtype, value_dim=dims[1], packed=len(lengths) > 1, lse=True, **MASKS[mask]
    )
    args = example.make(Inputs(WHERE, seed=2))
    conformance.check(attention_op, TRITON, TRITON.space.default(DEVICE, attention_op.problem(*args)), args)


def test_the_matrix_is_covered(capsys: pytest.CaptureFixture[str]) -> None:
    """Prints which dtype and groups of heads each head dim meets each mask with; each pair of two axes is met."""
    rows = [p.values for p in matrix()]
    short = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    with capsys.disabled():
        print("\nhead dim   " + "".join(f"{mask:>16}" for mask in MASKS))
        for dims in HEAD_DIMS:
            cells = [f"{short[r[2]]} {r[3][0]}/{r[3][1]}" for r in rows if r[0] == dims]
            print(f"{dims[0]:>4}/{dims[1]:<6}" + "".join(f"{cell:>16}" for cell in cells))
    for a, b in ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)):
        axes = (HEAD_DIMS, tuple(MASKS), DTYPES, HEADS)
        assert {(r[a], r[b]) for r in rows} == set(product(axes[a], axes[b])), f"axes {a} and {b}"


# A window that ends and begins one before, at and one behind an edge of a block, for tiles that do so too.
@needs_triton
@pytest.mark.parametrize("left", [62, 63, 64, 128])
@pytest.mark.parametrize("behind", [{"causal": True}, {"right": 1}, {}])
def test_windows_at_block_edges(left: int, behind: dict[str, Any]) -> None:
    lengths = ((129, 129), (65, 193), (70, 63))
    example = attention_example("", lengths, (1, 1), 16, packed=True, left=left, lse=True, **behind)
    args = example.make(Inputs(WHERE, seed=5))
    conformance.check(attention_op, TRITON, TRITON.space.default(DEVICE, attention_op.problem(*args)), args)


@needs_triton
@pytest.mark.parametrize("dim", [16, 192])
def test_a_chunk_has_the_bits_of_the_whole(dim: int) -> None:
    """With a window, sinks and a prefix."""
    inputs = Inputs(WHERE)
    q, k, v = (inputs.randn(1, 300, heads, dim, dtype=torch.bfloat16) for heads in (2, 1, 1))
    options: Any = {"causal": True, "window": 70, "sinks": inputs.randn(2), "prefix": 10}
    with invariant():
        whole: Any = ops.attention(q, k, v, **options)
        for start, end in ((64, 130), (130, 300), (299, 300)):
            chunk: Any = ops.attention(q[:, start:end], k[:, :end], v[:, :end], **options)
            assert torch.equal(whole[:, start:end], chunk), (start, end)


@pytest.mark.parametrize(
    ("options", "pairs"),
    [
        ({}, 4 * 6),
        ({"causal": True}, 3 + 4 + 5 + 6),
        ({"causal": True, "left": 1}, 2 * 4),
        ({"causal": True, "prefix": 5}, 5 + 5 + 5 + 6),
        ({"left": 0, "right": 1}, 2 + 2 + 2 + 1),
        ({"causal": True, "left": 3, "prefix": 5}, 5 + 5 + 4 + 4),
    ],
    ids=str,
)
def test_work_is_counted_by_what_is_seen(options: dict[str, Any], pairs: int) -> None:
    args = attention_example("", ((4, 6),) * 3, (2, 1), 16, value_dim=8, **options).make(Inputs("cpu"))
    assert attention_op.cost(*args).flops == 3 * pairs * 2 * 2 * (16 + 8)


@pytest.mark.parametrize("causal", [False, True])
def test_sm90_takes_windows(causal: bool) -> None:
    assert attention_op.make is not None
    args = attention_op.make(Inputs("meta"), B=2, KV=4096, causal=causal, window=512)
    assert SM90.refusal(CARDS["h100"], attention_op.problem(*args)) is None


# ---- bad input

Q, K = torch.zeros(2, 3, 4, 16), torch.zeros(2, 5, 2, 16)
BAD = {
    "window of 0": ({"window": 0}, "window is 0, wanted at least 1"),
    "negative window": ({"window": (-1, 3)}, "window is (-1, 3), wanted (left, right), each at least 0 or None"),
    "right and causal": ({"window": (2, 1), "causal": True}, "window is (2, 1), but a causal mask ends"),
    "prefix without causal": ({"prefix": 2}, "it needs causal=True"),
    "negative prefix": ({"prefix": -2, "causal": True}, "prefix is -2, wanted a number of keys, at least 0"),
    "prefixes": (
        {"prefix": torch.zeros(3).int(), "causal": True},
        "int32 [2] on cpu, one number per sequence; got torch.int32 [3]",
    ),
    "cap of 0": ({"softcap": 0.0}, "softcap is 0.0, wanted a finite number above 0"),
    "sinks": ({"sinks": torch.zeros(2)}, "sinks must be contiguous bfloat16 or float16 or float32 [4] on cpu"),
    "slopes": ({"alibi_slopes": torch.zeros(4).half()}, "alibi_slopes must be contiguous float32 [4] on cpu"),
    "slopes elsewhere": ({"alibi_slopes": torch.zeros(4, device="meta")}, "got torch.float32 [4] on meta"),
}


@pytest.mark.parametrize(("options", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        ops.attention(Q, K, K, **options)


def test_values_have_a_limit_of_their_own() -> None:
    with pytest.raises(ValueError, match="values' head dim is 264, wanted 1 to 256"):
        ops.attention(Q, K, torch.zeros(2, 5, 2, 264))
