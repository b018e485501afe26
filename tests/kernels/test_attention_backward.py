"""What conformance cannot say of attention's gradients: autograd, tile edges in every config, bad input, what sm90 prepares."""
# Triton's constants are values of another type to a type checker.
# pyright: reportArgumentType=false

import re
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests import conformance
from tilewright import ops
from tilewright.hw.device import CARD_OF_ARCH, CARDS, device_of
from tilewright.kernels.attention.attention import attention_op
from tilewright.kernels.attention.backward.backward import EXAMPLES, _example, attention_backward_op
from tilewright.kernels.attention.backward.sm90 import SM90, _ends, _round_kernel, _rows_kernel
from tilewright.kernels.attention.backward.tile import TRITON
from tilewright.kernels.attention.checks import window_bounds
from tilewright.kernels.attention.reference import Bends, attend, sequences
from tilewright.op import Inputs

DEVICE = device_of(0 if torch.cuda.is_available() else -1)
WHERE = "cuda" if DEVICE.kind == "cuda" else "cpu"
needs_triton = pytest.mark.skipif(not DEVICE.runs_triton, reason="no GPU here: run with TRITON_INTERPRET=1")

# ---- the definition


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.label)
def test_reference_is_the_derivative_of_the_forward_reference(example: Any) -> None:
    """In float64, by torch's autograd through the definition of `attention`."""
    do, q, k, v, _, _, cu_q, cu_k, *options, sinks, slopes = example.make(Inputs())
    *options, deterministic, left, right, prefix, prefixes, softcap = options
    do, q, k, v = (t.double().nan_to_num(0.5) for t in (do, q, k, v))
    sinks = None if sinks is None else sinks.double()
    of = [t for t in (q, k, v, sinks) if t is not None]
    for t in of:
        t.requires_grad_()
    bends = (left, right, prefix, prefixes, softcap)
    with torch.enable_grad():
        out, lse = attention_op.reference(q, k, v, cu_q, cu_k, *options, True, *bends, sinks, slopes)
        want = torch.autograd.grad(out, of, do) if out.requires_grad else [torch.zeros_like(t) for t in of]
    q, k, v, out, lse = (t.detach() for t in (q, k, v, out, lse))
    sinks = None if sinks is None else sinks.detach()
    args = (do, q, k, v, out, lse.double(), cu_q, cu_k, *options, deterministic, *bends, sinks, slopes)
    for name, g, w in zip(("q", "k", "v", "sinks"), attention_backward_op.reference(*args), want, strict=False):
        torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"d{name}: {text}")


# (queries, keys, left, right, prefix, softcap, sinks, ALiBi); right None and prefix: causal.
TINY = {
    "causal": (4, 5, None, None, 0, None, False, False),
    "window": (5, 4, 1, None, 0, None, False, False),
    "both sides": (4, 5, 1, 1, 0, None, True, False),
    "prefix": (4, 5, None, None, 3, None, False, True),
    "cap": (4, 5, None, None, 0, 0.7, True, True),
}


@pytest.mark.parametrize("tiny", TINY.values(), ids=TINY.keys())
def test_gradcheck(tiny: tuple[Any, ...]) -> None:
    """Finite differences of the two definitions, as autograd would call them."""
    rows, keys, left, right, prefix, softcap, with_sinks, alibi = tiny
    slopes = torch.tensor([0.5, 0.1], dtype=torch.float64) if alibi else None
    fixed: Any = (None, None, rows, keys, 0.6, right is None, True)
    bends = (left, right, prefix, None, softcap)

    class Defined(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
            parts = [
                attend(*part, scale=0.6, bends=Bends(left, 0 if right is None else right, prefix, softcap, sinks, slopes))
                for part in sequences((q,), (k, v), None, None)
            ]
            out, lse = torch.stack([o for o, _ in parts]), torch.cat([x for _, x in parts], 1)
            ctx.save_for_backward(q, k, v, out, lse, sinks)
            return out

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            *saved, sinks = ctx.saved_tensors
            found = attention_backward_op.reference(grads[0], *saved, *fixed, *bends, sinks, slopes)
            return *found[:3], None if sinks is None else found[3]

    made, wide = Inputs(), torch.float64
    q, k, v = (made.randn(1, n, h, d, dtype=wide) for n, h, d in ((rows, 2, 3), (keys, 1, 3), (keys, 1, 2)))
    sinks = made.randn(2, dtype=wide) if with_sinks else None
    inputs = [None if t is None else t.requires_grad_() for t in (q, k, v, sinks)]
    assert torch.autograd.gradcheck(Defined.apply, inputs, fast_mode=False)


# ---- autograd


def by_torch(q: Tensor, k: Tensor, v: Tensor, do: Tensor, causal: bool, scale: float | None) -> tuple[Tensor, ...]:
    """Gradients of [B, S, H, D] by another road: SDPA with a mask tensor, in float64."""
    q, k, v = (t.detach().double().requires_grad_() for t in (q, k, v))
    rows, keys = q.shape[1], k.shape[1]
    mask = torch.ones(rows, keys, dtype=torch.bool, device=q.device)
    if causal:
        mask = mask.tril(keys - rows)
    q_, k_, v_ = (t.transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q_, k_, v_, mask, scale=scale, enable_gqa=True).transpose(1, 2)
    return torch.autograd.grad(out, (q, k, v), do.double())


ROADS = ("equal", "packed", "sdpa")


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize(("rows", "keys"), [(6, 6), (3, 9)])
@pytest.mark.parametrize("heads", [(2, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients(road: str, rows: int, keys: int, heads: tuple[int, int], causal: bool) -> None:
    inputs = Inputs(WHERE)
    q, k, v, do = (
        inputs.randn(2, n, h, 16) for n, h in ((rows, heads[0]), (keys, heads[1]), (keys, heads[1]), (rows, heads[0]))
    )
    for t in (q, k, v):
        t.requires_grad_()
    if road == "sdpa":
        if causal and rows != keys:
            pytest.skip("sdpa aligns the first query with the first key: such a call is torch's")
        q_, k_, v_ = (t.transpose(1, 2) for t in (q, k, v))
        out = ops.sdpa(q_, k_, v_, is_causal=causal, enable_gqa=True).transpose(1, 2)
    elif road == "packed":
        cu_q, cu_k = (inputs.tensor([0, n, 2 * n], torch.int32) for n in (rows, keys))
        flat = (t.flatten(0, 1) for t in (q, k, v))
        out: Any = ops.attention(*flat, causal=causal, cu_q=cu_q, cu_k=cu_k, max_q=rows, max_k=keys)
        out = out.unflatten(0, (2, rows))
    else:
        out = ops.attention(q, k, v, causal=causal)
    got = torch.autograd.grad(out, (q, k, v), do)
    for g, w in zip(got, by_torch(q, k, v, do, causal, None), strict=True):
        assert g.dtype == torch.float32
        torch.testing.assert_close(g, w.float(), rtol=1e-4, atol=1e-5)


def test_gradients_compile_as_one_graph() -> None:
    inputs = Inputs(WHERE)
    q, k, v = (inputs.randn(1, 5, 2, 16).requires_grad_() for _ in range(3))
    sinks, do = inputs.randn(2).requires_grad_(), inputs.randn(1, 5, 2, 16)

    def call(*of: Tensor) -> Any:
        return ops.attention(*of[:3], causal=True, window=3, sinks=of[3])

    want = torch.autograd.grad(call(q, k, v, sinks), (q, k, v, sinks), do)
    with conformance.quiet_compile():
        out = torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v, sinks)
    for g, w in zip(torch.autograd.grad(out, (q, k, v, sinks), do), want, strict=True):
        assert torch.equal(g, w)


def test_gradient_of_a_sum() -> None:
    """An expanded scalar has no strides that a kernel could read."""
    inputs = Inputs(WHERE)
    q, k, v = (inputs.randn(1, 5, 2, 16).requires_grad_() for _ in range(3))
    out: Any = ops.attention(q, k, v, causal=True, scale=0.3)
    out.sum().backward()
    for t, w in zip((q, k, v), by_torch(q, k, v, torch.ones_like(out), True, 0.3), strict=True):
        torch.testing.assert_close(t.grad, w.float(), rtol=1e-4, atol=1e-5)


def test_rows_that_see_no_key_give_and_get_nothing() -> None:
    inputs = Inputs(WHERE)
    q, k, v = (inputs.randn(1, rows, 2, 16).requires_grad_() for rows in (5, 2, 2))
    out, lse = ops.attention(q, k, v, causal=True, return_lse=True)
    assert not lse.requires_grad
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), inputs.randn(1, 5, 2, 16))
    assert not dq[:, :3].any()
    assert dq[:, 3:].isfinite().all()
    assert dk.isfinite().all()
    assert dv.isfinite().all()


BENT: dict[str, dict[str, Any]] = {
    "window": {"causal": True, "window": 3},
    "left and right": {"window": (1, 4)},
    "prefix of each": {"causal": True, "prefix": [0, 5]},
    "cap": {"softcap": 0.7},
    "sinks, slopes": {"causal": True, "sinks": True, "alibi_slopes": True},
    "all of it": {"causal": True, "window": (3, 0), "prefix": 2, "softcap": 2.0, "sinks": True, "alibi_slopes": True},
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("options", BENT.values(), ids=BENT.keys())
def test_gradients_of_what_is_bent(options: dict[str, Any], packed: bool) -> None:
    """Against torch's autograd through the definition, in float64. Values are narrower than keys, sinks of another dtype."""
    rows, keys, inputs, options = 6, 9, Inputs(WHERE), dict(options)
    q, k, v = (inputs.randn(2, n, h, d).requires_grad_() for n, h, d in ((rows, 2, 8), (keys, 1, 8), (keys, 1, 6)))
    do = inputs.randn(2, rows, 2, 6)
    sinks = inputs.randn(2, dtype=torch.float16).requires_grad_() if "sinks" in options else None
    slopes = torch.tensor([0.5, 0.1], device=WHERE) if "alibi_slopes" in options else None
    if isinstance(options.get("prefix"), list):
        options["prefix"] = torch.tensor(options["prefix"], dtype=torch.int32, device=WHERE)
    options |= {"sinks": sinks, "alibi_slopes": slopes}
    of = [t for t in (q, k, v, sinks) if t is not None]
    wide = [t.detach().double().requires_grad_() for t in of]
    left, right = window_bounds(options.get("window"), options.get("causal", False))
    prefix = options.get("prefix", 0)
    bent = (0, prefix) if isinstance(prefix, Tensor) else (prefix, None)
    fixed: Any = (None, None, rows, keys, 8**-0.5, options.get("causal", False), False)
    sink = wide[3] if sinks is not None else None
    out, _ = attention_op.reference(*wide[:3], *fixed, left, right, *bent, options.get("softcap"), sink, slopes)
    want = torch.autograd.grad(out, wide, do.double())
    if packed:
        cu: list[Any] = [inputs.tensor([0, n, 2 * n], torch.int32) for n in (rows, keys)]
        flat = (t.flatten(0, 1) for t in (q, k, v))
        got: Any = ops.attention(*flat, cu_q=cu[0], cu_k=cu[1], max_q=rows, max_k=keys, **options)
        got = got.unflatten(0, (2, rows))
    else:
        got = ops.attention(q, k, v, **options)
    for t, g, w in zip(of, torch.autograd.grad(got, of, do), want, strict=True):
        assert g.dtype == t.dtype
        torch.testing.assert_close(g.double(), w, rtol=1e-4 if g.dtype == torch.float32 else 2e-3, atol=1e-5)


X = torch.zeros(1, 3, 2, 16, requires_grad=True)
BAD = {
    "slopes": (
        lambda: ops.attention(X, X, X, alibi_slopes=torch.zeros(2, requires_grad=True)),
        "alibi_slopes has no gradient; pass alibi_slopes.detach()",
    ),
    "window of 0": (lambda: ops.attention(X, X, X, window=0), "window is 0, wanted at least 1"),
    "shapes": (lambda: ops.attention(X, X[:, :, :, :8], X[..., :8]), "with one D"),
}


@pytest.mark.parametrize(("call", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


# ---- tiles


def tiles() -> list[Any]:
    """A config for each (TILE, STEP) of the portable kernel: the interpreter knows neither warps nor stages."""
    problem = attention_backward_op.problem(*_example("", ((1, 1),), (1, 1), 16).make(Inputs("cpu")))
    found = {(c["TILE"], c["STEP"]): c for c in TRITON.space.configs(CARD_OF_ARCH[90], problem)}
    return [pytest.param(c, id=f"{m}x{n}") for (m, n), c in found.items()]


@needs_triton
@pytest.mark.parametrize("config", tiles())
@pytest.mark.parametrize("causal", [False, True])
def test_masks_at_tile_edges(config: Any, causal: bool) -> None:
    """One less and one more than a tile, on either side, and causal masks that end before, at and behind one."""
    tile = config["TILE"]
    lengths = ((tile - 1, tile + 1), (tile + 1, tile), (2, 1))
    example = _example("", lengths, (1, 1), 16, torch.float32, packed=True, causal=causal)
    conformance.check(attention_backward_op, TRITON, config, example.make(Inputs(WHERE, seed=5)))


# A window, or a prefix, that ends one before, at and one behind an edge of a block, on either side.
@needs_triton
@pytest.mark.parametrize("left", [31, 32])
@pytest.mark.parametrize("behind", [{"causal": True, "prefix": 33}, {"right": 1}, {}])
def test_windows_at_block_edges(left: int, behind: dict[str, Any]) -> None:
    example = _example("", ((65, 97), (70, 63)), (1, 1), 16, torch.float32, packed=True, left=left, **behind)
    config = {"TILE": 64, "STEP": 32, "num_warps": 4, "num_stages": 1}
    conformance.check(attention_backward_op, TRITON, config, example.make(Inputs(WHERE, seed=5)))


@needs_triton
@pytest.mark.parametrize("layout", ["heads first", "every other row", "one head of many"])
def test_layouts(layout: str) -> None:
    """The portable kernel reads any strides with a dense last dimension."""
    args = list(_example("", ((20, 20),) * 2, (2, 2), 16, torch.float32, causal=True).make(Inputs(WHERE)))
    for i in range(5):
        t = args[i]
        wide = t.new_zeros(2, 2, 20, 16) if layout == "heads first" else t.new_zeros(2, 40, 6, 16)
        view = {"heads first": wide.transpose(1, 2), "every other row": wide[:, ::2, :2], "one head of many": wide[:, :20, 1:3]}
        args[i] = view.get(layout, wide).copy_(t)
    conformance.check(attention_backward_op, TRITON, {"TILE": 32, "STEP": 32, "num_warps": 4, "num_stages": 1}, tuple(args))


# ---- what sm90 prepares and finishes


@needs_triton
def test_rows_kernel() -> None:
    """-lse / scale and -delta, padded to whole blocks; -inf where a row sees no key or is none."""
    do, q, _, _, out, lse, *_ = _example("", ((70, 20),) * 2, (2, 1), 16, torch.float16, causal=True).make(Inputs(WHERE))
    bounds = torch.full((2, 2 * 2 * 2 * 64), float("nan"), device=WHERE)
    strides = (*do.stride()[:3], *out.stride()[:3])
    _rows_kernel[(2 * 2 * 2,)](do, out, lse, bounds, 2, 70, 140, 2, 4.0, *strides, D=16, BLOCK_M=64)
    want_lse = torch.full((2, 2, 128), float("-inf"), device=WHERE)
    want_lse[:, :, :70] = torch.where(lse.isinf(), lse, -4.0 * lse).view(2, 2, 70).transpose(0, 1)
    want_delta = torch.zeros(2, 2, 128, device=WHERE)
    want_delta[:, :, :70] = -(do.float() * out.float()).sum(-1).transpose(1, 2)
    torch.testing.assert_close(bounds[0].view(2, 2, 128), want_lse)
    torch.testing.assert_close(bounds[1].view(2, 2, 128), want_delta, rtol=1e-5, atol=1e-5)
    assert q.shape[1] == 70


@needs_triton
@pytest.mark.parametrize(("dim", "rows"), [(64, 64), (64, 128), (128, 64), (256, 64)])
def test_round_kernel(dim: int, rows: int) -> None:
    """From the order in which threads of a warpgroup hold a product's result to rows of dq."""
    columns = 128 if dim == 256 else 64 if rows * dim >= 8192 else 32
    parts = rows * dim // (64 * columns)
    dq = torch.randn(2, 2 * rows, 3, dim, generator=torch.Generator().manual_seed(0))  # B, S, H, D: two blocks a head
    held = []
    for block in dq.permute(0, 2, 1, 3).reshape(-1, rows, dim):
        for part in range(parts):
            box = block[part * 64 : part * 64 + 64] if rows == 128 else block[:, part * columns : (part + 1) * columns]
            # Accumulators of wgmma (PTX ISA, "wgmma.mma_async", figure of matrix D): a warp has 16 rows, a thread rows 8
            # apart and pairs of columns 8 apart. A thread's pairs of both rows are neighbours in memory.
            apart = box.reshape(4, 2, 8, columns // 8, 4, 2)  # warp, upper or lower, row, column / 8, thread, pair
            held.append(apart.permute(3, 0, 2, 4, 1, 5).reshape(-1))
    sums = torch.cat(held).to(WHERE)
    got = torch.full((2, 2 * rows - 1, 3, dim), float("nan"), device=WHERE)
    _round_kernel[(len(held) // parts,)](sums, got, 2, 2 * rows - 1, 3, 0.5, D=dim, BLOCK_M=rows, PARTS=parts, N=columns)
    torch.testing.assert_close(got.cpu(), 0.5 * dq[:, :-1])


@needs_triton
@pytest.mark.parametrize("lengths", [(7,), (3, 0, 0, 1025, 1), (0, 0, 2000), (64,) * 33, (1, 5, 0)], ids=str)
def test_ends_kernel(lengths: tuple[int, ...]) -> None:
    of_each = torch.tensor(lengths, device=WHERE)
    cu = torch.cat([of_each.new_zeros(1), of_each.cumsum(0)]).int()
    assert torch.equal(_ends(cu, sum(lengths)), torch.repeat_interleave(cu[1:], of_each))


def test_documents_that_attend_to_themselves_are_known_behind_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    """By one tensor of lengths for queries and keys: so the kernel for Hopper is taken."""
    seen, cu = [], Inputs(WHERE).tensor([0, 3, 3, 8], torch.int32)
    noted = lambda *args: seen.append(attention_backward_op.problem(*args).alike) or attention_backward_op(*args)  # noqa: E731
    monkeypatch.setattr(sys.modules["tilewright.ops.attention"], "attention_backward_op", noted)
    for cu_k in (cu, cu.clone()):
        q, k, v = (Inputs(WHERE).randn(8, 2, 16).requires_grad_() for _ in range(3))
        out: Any = ops.attention(q, k, v, causal=True, cu_q=cu, cu_k=cu_k, max_q=5, max_k=5)
        out.sum().backward()
    assert seen == [True, False]


# ---- which implementation


@pytest.mark.parametrize(
    ("dims", "card", "chosen"),
    [
        ({"KV": 8192}, "h100", "sm90"),
        ({"KV": 512, "D": 64, "causal": True}, "h100", "sm90"),
        ({"KV": 512, "D": 256, "deterministic": True}, "h100", "sm90"),
        ({"KV": 512, "packed": True}, "h100", "triton"),
        ({"KV": 512, "packed": True, "causal": True}, "h100", "sm90"),
        ({"KV": 512, "Q": 300, "packed": True, "causal": True}, "h100", "triton"),
        ({"KV": 512, "D": 80}, "h100", "triton"),
        ({"KV": 512, "sinks": True}, "h100", "sm90"),
        ({"KV": 512, "causal": True, "window": 128}, "h100", "sm90"),
        ({"KV": 512, "window": 128}, "h100", "triton"),
        ({"KV": 512, "D": 192, "V": 128}, "h100", "triton"),
        ({"KV": 512, "dtype": torch.float32}, "h100", "triton"),
        ({"KV": 512}, "a100", "triton"),
        ({"KV": 512, "D": 64, "dtype": torch.float16}, "b200", "triton"),
    ],
    ids=str,
)
def test_what_is_taken_unmeasured(dims: dict[str, Any], card: str, chosen: str) -> None:
    """Its default is one of its own space, and so is that of each other implementation that does not refuse."""
    assert attention_backward_op.make is not None
    args = attention_backward_op.make(Inputs("meta"), B=2, **dims)
    device, problem = CARDS[card], attention_backward_op.problem(*args)
    allowed = [impl for impl in attention_backward_op.impls if impl.refusal(device, problem) is None]
    assert allowed[0].name == chosen
    for impl in allowed:
        assert impl.space.default(device, problem) in list(impl.space.configs(device, problem))


@pytest.mark.parametrize(
    ("dims", "card", "reason"),
    [
        ({}, "a100", "needs sm_90, this is sm_80"),
        ({"dtype": torch.float32}, "h100", "supports bf16 and fp16 only, not torch.float32"),
        ({"D": 96}, "h100", "supports head dims (64, 128, 256) only, not 96"),
        ({"D": 128, "V": 64}, "h100", "needs the same head dim for keys and values, not 128 and 64"),
        (
            {"causal": True, "window": 8, "prefix": 3, "softcap": 2.0, "alibi": True, "sinks": True},
            "h100",
            "does not support prefixes, soft caps, ALiBi",
        ),
        ({"window": 8}, "h100", "does not support windows"),
        ({"packed": True}, "h100", "supports packed sequences only if they attend to themselves under a causal mask"),
        ({"packed": True, "causal": True, "D": 64, "window": 9, "deterministic": True}, "h100", None),
        ({"Q": 7, "causal": True}, "h100", None),
    ],
    ids=str,
)
def test_what_sm90_refuses(dims: dict[str, Any], card: str, reason: str | None) -> None:
    assert attention_backward_op.make is not None
    problem = attention_backward_op.problem(*attention_backward_op.make(Inputs("meta"), B=2, KV=64, **dims))
    assert SM90.refusal(CARDS[card], problem) == reason
