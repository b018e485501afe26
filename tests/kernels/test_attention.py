"""What conformance cannot say of attention: tile edges in every config, public shapes, bad input, `sdpa`, invariance."""

import inspect
import re
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests import conformance
from tilewright import ops
from tilewright.asm.certificate import load
from tilewright.hw.device import CARD_OF_ARCH, CARDS, device_of
from tilewright.kernels.attention.attention import EXAMPLES, attention_example, attention_op
from tilewright.kernels.attention.sdpa import VENDOR
from tilewright.kernels.attention.sm90 import SM90
from tilewright.kernels.attention.tile import TRITON
from tilewright.op import Inputs, invariant

sdpa_module = import_module("tilewright.ops.sdpa")  # the package has the function under that name
DEVICE = device_of(0 if torch.cuda.is_available() else -1)
WHERE = "cuda" if DEVICE.kind == "cuda" else "cpu"
needs_triton = pytest.mark.skipif(not DEVICE.runs_triton, reason="no GPU here: run with TRITON_INTERPRET=1")

# ---- tile edges

# One less, just, and one more than a tile, on either side, and causal masks that end before, at and behind one.
EDGES = ((63, 65), (64, 64), (65, 63), (1, 129), (129, 128), (2, 1))


def tiles() -> list[Any]:
    """A config for each (BLOCK_M, BLOCK_N) of the portable kernel: the interpreter knows neither warps nor stages."""
    problem = attention_op.problem(*attention_example("", ((1, 1),), (1, 1), 16).make(Inputs("meta")))
    found = {(c["BLOCK_M"], c["BLOCK_N"]): c for c in TRITON.space.configs(CARD_OF_ARCH[90], problem)}
    return [pytest.param(c, id=f"{m}x{n}") for (m, n), c in found.items()]


@needs_triton
@pytest.mark.parametrize("config", tiles())
@pytest.mark.parametrize("causal", [False, True])
def test_masks_at_tile_edges(config: Any, causal: bool) -> None:
    example = attention_example("", EDGES, (1, 1), 16, packed=True, causal=causal, lse=True)
    conformance.check(attention_op, TRITON, config, example.make(Inputs(WHERE, seed=5)))


@needs_triton
@pytest.mark.parametrize("layout", ["heads first", "every other row", "one head of many"])
def test_layouts(layout: str) -> None:
    """The portable kernel reads any strides with a dense last dimension."""
    inputs = Inputs(WHERE)
    if layout == "heads first":
        q, k, v = (inputs.randn(2, heads, 20, 16).transpose(1, 2) for heads in (4, 2, 2))
    elif layout == "every other row":
        q, k, v = (inputs.randn(2, 40, heads, 16)[:, ::2] for heads in (4, 2, 2))
    else:
        q, k, v = (inputs.randn(2, 20, 3, 16)[:, :, 1:2] for _ in range(3))
    args = (q, k, v, None, None, 20, 20, 0.25, True, True)
    conformance.check(attention_op, TRITON, TRITON.space.default(DEVICE, attention_op.problem(*args)), args)


@needs_triton
def test_a_row_does_not_depend_on_its_batch() -> None:
    """Alone, beside others, packed behind others, or as a chunk: the same bits."""
    inputs = Inputs(WHERE)
    q, k, v = (inputs.randn(3, 150, heads, 16, dtype=torch.bfloat16) for heads in (2, 1, 1))
    cu = inputs.tensor([0, 150, 300], torch.int32)
    with invariant():
        alone: Any = ops.attention(q[1:2], k[1:2], v[1:2], causal=True)[0]
        batch = ops.attention(q, k, v, causal=True)[1]
        packed: Any = ops.attention(
            q[:2].flatten(0, 1), k[:2].flatten(0, 1), v[:2].flatten(0, 1), causal=True, cu_q=cu, cu_k=cu, max_q=150, max_k=150
        )[150:]
        chunk = ops.attention(q[1:2, 64:130], k[1:2, :130], v[1:2, :130], causal=True)[0]
    assert torch.equal(alone, batch)
    assert torch.equal(alone, packed)
    assert torch.equal(alone[64:130], chunk)


def test_vendor_matches_definition() -> None:
    """What `vendor` makes of its arguments and refuses, here with the CPU's library."""
    taken = 0
    for example in EXAMPLES:
        args = example.make(Inputs(WHERE))
        if VENDOR.refuse(DEVICE, attention_op.problem(*args)) is None and args[0].numel():
            conformance.check(attention_op, VENDOR, {}, args)
            taken += 1
    assert taken >= 5


# ---- the public function


def by_torch(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    """(out [B, S, H, D], lse [B, H, S]) by another road: SDPA with a mask tensor, in float64."""
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    rows, keys = q.shape[2], k.shape[2]
    mask = torch.ones(rows, keys, dtype=torch.bool, device=q.device)
    if causal:
        mask = mask.tril(keys - rows)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    out = F.scaled_dot_product_attention(q, k, v, mask, scale=factor, enable_gqa=True)
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * factor
    return out.transpose(1, 2), scores.masked_fill(~mask, float("-inf")).logsumexp(-1)


@pytest.mark.parametrize(("rows", "keys"), [(5, 5), (3, 9), (1, 4), (40, 34)])
@pytest.mark.parametrize(("heads", "scale"), [((2, 2), None), ((3, 1), 0.7)])
@pytest.mark.parametrize("causal", [False, True])
def test_is_softmax_attention(rows: int, keys: int, heads: tuple[int, int], causal: bool, scale: float | None) -> None:
    inputs = Inputs(WHERE)
    q, k, v = inputs.randn(2, rows, heads[0], 16), inputs.randn(2, keys, heads[1], 16), inputs.randn(2, keys, heads[1], 16)
    want, want_lse = by_torch(q, k, v, causal, scale)
    out, lse = ops.attention(q, k, v, causal=causal, scale=scale, return_lse=True)
    assert out.is_contiguous()
    torch.testing.assert_close(out, want.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, want_lse.float(), rtol=1e-5, atol=1e-5)
    cu_q, cu_k = (inputs.tensor([0, n, 2 * n], torch.int32) for n in (rows, keys))
    flat = (t.flatten(0, 1) for t in (q, k, v))
    lengths: Any = {"cu_q": cu_q, "cu_k": cu_k, "max_q": rows, "max_k": keys}
    packed, packed_lse = ops.attention(*flat, causal=causal, scale=scale, return_lse=True, **lengths)
    torch.testing.assert_close(packed.view_as(out), out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(packed_lse, lse.transpose(0, 1).flatten(1), rtol=1e-5, atol=1e-5)


def test_rows_that_see_no_key() -> None:
    inputs = Inputs(WHERE)
    q, k, v = inputs.randn(1, 5, 2, 16), inputs.randn(1, 2, 2, 16), inputs.randn(1, 2, 2, 16)
    out, lse = ops.attention(q, k, v, causal=True, return_lse=True)
    assert not out[0, :3].any()
    assert (lse[0, :, :3] == float("-inf")).all()
    torch.testing.assert_close(out[0, 3], v[0, 0], rtol=1e-5, atol=1e-5)


Q, K = torch.zeros(2, 3, 4, 16), torch.zeros(2, 5, 2, 16)
PQ, PK, CU_Q, CU_K = Q.flatten(0, 1), K.flatten(0, 1), torch.tensor([0, 3, 6]).int(), torch.tensor([0, 5, 10]).int()


def packed_call(**changes: Any) -> Any:
    return ops.attention(PQ, PK, PK, **{"cu_q": CU_Q, "cu_k": CU_K, "max_q": 3, "max_k": 5, **changes})


BAD = {
    "dims": (lambda: ops.attention(Q[0, 0], K, K), "got [4, 16], [2, 5, 2, 16], [2, 5, 2, 16]"),
    "mixed forms": (lambda: ops.attention(PQ, K, K), "got [6, 4, 16], [2, 5, 2, 16]"),
    "D": (lambda: ops.attention(Q, K[..., :8], K[..., :8]), "with one D; got [2, 3, 4, 16], [2, 5, 2, 8]"),
    "v": (lambda: ops.attention(Q, K, K[:, :4]), "[2, 5, 2, 16], [2, 4, 2, 16]"),
    "batch": (lambda: ops.attention(Q, K[:1], K[:1]), "q has 2 sequences, k and v have 1"),
    "heads": (lambda: ops.attention(Q[:, :, :3], K, K), "3 query heads are not a multiple of 2"),
    "head dim": (lambda: ops.attention(*[torch.zeros(1, 2, 1, 264)] * 3), "head dim is 264, wanted 1 to 256"),
    "float64": (lambda: ops.attention(*[K.double()] * 3), "q is torch.float64, wanted"),
    "dtype": (lambda: ops.attention(Q, K.half(), K), "k is torch.float16 on cpu; it must match q, torch.float32 on cpu"),
    "device": (lambda: ops.attention(Q, K, K.to("meta")), "v is torch.float32 on meta"),
    "strides": (lambda: ops.attention(Q, *[torch.zeros(2, 5, 2, 32)[..., ::2]] * 2), "k has strides (320, 64, 32, 2)"),
    "scale": (lambda: ops.attention(Q, K, K, scale=-1.0), "scale is -1.0, wanted a finite number above 0"),
    "nan scale": (lambda: ops.attention(Q, K, K, scale=float("nan")), "scale is nan"),
    "lengths of equal ones": (lambda: ops.attention(Q, K, K, max_q=3), "max_q are for packed operands"),
    "no lengths": (lambda: ops.attention(PQ, PK, PK), "cu_q or max_q is missing"),
    "no longest": (lambda: packed_call(max_k=None), "cu_k or max_k is missing"),
    "int64": (lambda: packed_call(cu_q=CU_Q.long()), "must be contiguous int32 [sequences + 1] on cpu; got torch.int64 [3]"),
    "cu device": (lambda: packed_call(cu_k=CU_K.to("meta")), "on meta"),
    "sequences": (lambda: packed_call(cu_k=torch.tensor([0, 10]).int(), max_k=10), "cu_q is for 2 sequences, cu_k for 1"),
    "longer than all": (lambda: packed_call(max_q=7), "max_q is 7, wanted 0 to 6"),
    "shorter than one": (lambda: packed_call(max_q=2), "max_q is 2, but the longest sequence of cu_q has 3"),
    "end": (lambda: packed_call(cu_k=torch.tensor([0, 5, 9]).int()), "from 0 to 10, the rows of all sequences; got [0, 5, 9]"),
    "falling": (lambda: packed_call(cu_q=torch.tensor([0, 7, 6]).int()), "must rise from 0 to 6"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


# ---- which implementation


@pytest.mark.parametrize(
    ("dims", "card", "chosen"),
    [
        ({"KV": 8192}, "h100", "sm90"),
        ({"KV": 512, "H": 16, "G": 16}, "h100", "vendor"),
        ({"KV": 512, "H": 16, "G": 16, "causal": True}, "h100", "vendor"),
        ({"KV": 1024, "H": 16, "G": 16, "causal": True}, "h100", "sm90"),
        ({"KV": 256}, "h100", "vendor"),
        ({"KV": 512}, "h100", "sm90"),
        ({"KV": 512, "causal": True}, "h100", "sm90"),
        ({"KV": 512, "Q": 1}, "h100", "vendor"),
        ({"KV": 256, "D": 64}, "h100", "vendor"),
        ({"KV": 512, "D": 64}, "h100", "sm90"),
        ({"KV": 512, "D": 64, "causal": True}, "h100", "vendor"),
        ({"KV": 1024, "D": 64, "causal": True}, "h100", "sm90"),
        ({"KV": 512, "D": 256}, "h100", "vendor"),
        ({"KV": 512, "D": 256, "causal": True}, "h100", "vendor"),
        ({"KV": 1024, "D": 256}, "h100", "sm90"),
        ({"KV": 1024, "D": 256, "causal": True}, "h100", "sm90"),
        ({"KV": 512, "packed": True}, "h100", "sm90"),
        ({"KV": 512, "lse": True}, "h100", "sm90"),
        ({"KV": 8192, "D": 80}, "h100", "vendor"),
        ({"KV": 8192, "D": 80, "packed": True}, "h100", "triton"),
        ({"KV": 8192, "D": 192, "V": 128, "causal": True}, "h100", "sm90"),
        ({"KV": 8192, "D": 192, "V": 128, "packed": True}, "h100", "sm90"),
        ({"KV": 8192, "Q": 100, "causal": True}, "h100", "sm90"),
        ({"KV": 8192, "causal": True, "window": 1024}, "h100", "sm90"),
        ({"KV": 512, "causal": True, "window": 128}, "h100", "sm90"),
        ({"KV": 512, "causal": True, "window": 128, "sinks": True}, "h100", "sm90"),
        ({"KV": 512, "causal": True, "alibi": True}, "a100", "triton"),
        ({"KV": 8192, "Q": 100, "causal": True, "dtype": torch.float32}, "h100", "triton"),
        ({"KV": 8192, "Q": 1, "causal": True, "dtype": torch.float32}, "h100", "vendor"),
        ({"KV": 8192}, "a100", "vendor"),
        ({"KV": 8192, "D": 80, "packed": True}, "a100", "triton"),
        ({"KV": 8192, "lse": True}, "b200", "triton"),
    ],
    ids=str,
)
def test_what_is_taken_unmeasured(dims: dict[str, Any], card: str, chosen: str) -> None:
    """Its default is one of its own space, and so is that of each other implementation that does not refuse."""
    assert attention_op.make is not None
    args = attention_op.make(Inputs("meta"), B=2, **dims)
    device, problem = CARDS[card], attention_op.problem(*args)
    allowed = [impl for impl in attention_op.impls if impl.refusal(device, problem) is None]
    first = attention_op.first(device, problem)
    assert next((impl for impl in allowed if impl.name == first), allowed[0]).name == chosen
    for impl in allowed:
        configs = list(impl.space.configs(device, problem))
        assert not impl.space.axes or impl.space.default(device, problem) in configs


@pytest.mark.parametrize("dims", [{}, {"causal": True}, {"D": 64}, {"D": 64, "causal": True}, {"D": 256}], ids=str)
def test_invariant_mode_has_one_config_for_every_length(dims: dict[str, Any]) -> None:
    """And for every batch, number of heads, form and layout: those do not choose."""
    assert attention_op.make is not None
    chosen = []
    for other in (
        {"KV": 17},
        {"KV": 512, "lse": True},
        {"KV": 8192},
        {"KV": 8192, "Q": 1},
        {"KV": 3000, "packed": True, "B": 9},
    ):
        problem = attention_op.problem(*attention_op.make(Inputs("meta"), **{"B": 1, **dims, **other}))
        with invariant():
            chosen += [attention_op.choose(CARDS["h100"], one) for one in (problem, problem._replace(tma=False, heads=4))]
    assert {choice.impl.name for choice in chosen} == {"sm90_invariant"}
    assert all(choice.config == chosen[0].config for choice in chosen)


@pytest.mark.parametrize(
    ("dims", "card", "reason"),
    [
        ({"KV": 64}, "a100", "needs sm_90, this is sm_80"),
        ({"KV": 64, "dtype": torch.float32}, "h100", "supports bf16 and fp16 only, not torch.float32"),
        (
            {"KV": 64, "D": 96},
            "h100",
            "supports head dims of keys and values 64/64, 128/64, 128/128, 192/128, 256/128, 256/256 only, not 96/96",
        ),
        ({"KV": 64}, "h100", None),
        ({"KV": 64, "D": 64, "packed": True, "lse": True}, "h100", None),
        (
            {"KV": 64, "V": 80},
            "h100",
            "supports head dims of keys and values 64/64, 128/64, 128/128, 192/128, 256/128, 256/256 only, not 128/80",
        ),
        ({"KV": 64, "D": 192, "V": 128, "causal": True}, "h100", None),
        ({"KV": 64, "V": 64}, "h100", None),
        ({"KV": 64, "window": 8}, "h100", None),
        ({"KV": 64, "causal": True, "prefix": 8, "alibi": True}, "h100", "does not support prefixes, ALiBi"),
    ],
    ids=str,
)
def test_what_sm90_refuses(dims: dict[str, Any], card: str, reason: str | None) -> None:
    assert attention_op.make is not None
    problem = attention_op.problem(*attention_op.make(Inputs("meta"), B=2, **dims))
    assert SM90.refusal(CARDS[card], problem) == reason


def test_the_portable_kernels_defaults_spill_nothing_on_sm_80() -> None:
    """In any example: head dims 32 to 256, every mask."""
    cases = {name: case for name, case in load("attention")["cases"].items() if re.fullmatch(r"triton/.*/sm_80", name)}
    assert len(cases) > 20
    assert [name for name, case in cases.items() if any("spill_bytes" in kernel for kernel in case["kernels"])] == []


def test_heads_first_are_no_matrix_of_rows() -> None:
    t = torch.zeros(2, 8, 4, 64, dtype=torch.bfloat16)
    for q, tma in ((t, True), (t.transpose(1, 2), False), (t[:, ::2], True), (t[:, :4], False), (t[..., :60], True)):
        assert attention_op.problem(q, q, q, None, None, q.shape[1], q.shape[1], 1.0, False, False).tma == tma
    odd = torch.zeros(2, 8, 4, 60, dtype=torch.bfloat16)  # heads of 120 bytes
    assert not attention_op.problem(odd, odd, odd, None, None, 8, 8, 1.0, False, False).tma


# ---- sdpa

MASK = torch.rand(7, 7, generator=torch.Generator().manual_seed(0)) > 0.3
SAME: dict[str, tuple[dict[str, Any], bool]] = {
    "plain": ({}, True),
    "causal": ({"is_causal": True}, True),
    "scale": ({"scale": 0.3}, True),
    "grouped": ({"groups": 2, "enable_gqa": True, "is_causal": True}, True),
    "more keys": ({"keys": 9}, True),
    "more keys, causal from the first": ({"keys": 9, "is_causal": True}, False),
    "mask": ({"attn_mask": MASK}, False),
    "negative scale": ({"scale": -0.3}, False),
    "heads first": ({"heads_first": True, "is_causal": True}, False),
    "float64": ({"dtype": torch.float64}, False),
    "narrow values": ({"value_dim": 8}, True),
    "narrow values, gradient": ({"value_dim": 8, "grad": True}, True),
    "gradient": ({"grad": True}, True),
}


@pytest.mark.parametrize(("options", "ours"), SAME.values(), ids=SAME.keys())
def test_sdpa_is_torchs(options: dict[str, Any], ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same numbers as torch's function, from the kernels here where it says so."""
    options = dict(options)
    keys, groups, dim = options.pop("keys", 7), options.pop("groups", 4), options.pop("value_dim", 16)
    dtype, heads_first, grad = (
        options.pop("dtype", torch.float32),
        options.pop("heads_first", False),
        options.pop("grad", False),
    )
    inputs, taken = Inputs(WHERE), []
    q, k, v = (
        inputs.randn(2, rows, heads, width, dtype=dtype).transpose(1, 2)
        for rows, heads, width in ((7, 4, 16), (keys, groups, 16), (keys, groups, dim))
    )
    if heads_first:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    if "attn_mask" in options:
        options["attn_mask"] = options["attn_mask"].to(WHERE)
    q.requires_grad_(grad)
    attention = sdpa_module.attention
    monkeypatch.setattr(sdpa_module, "attention", lambda *a, **k: taken.append(1) or attention(*a, **k))
    got = ops.sdpa(q, k, v, **options)
    assert bool(taken) == ours
    assert got.requires_grad == grad
    torch.testing.assert_close(got, F.scaled_dot_product_attention(q, k, v, **options), rtol=1e-5, atol=1e-5)


def test_sdpa_has_torchs_arguments() -> None:
    names = ["query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"]
    assert list(inspect.signature(ops.sdpa).parameters) == names


def test_sdpa_refuses_what_torch_refuses() -> None:
    with pytest.raises(RuntimeError):
        ops.sdpa(Q.transpose(1, 2), K.transpose(1, 2), K.transpose(1, 2))  # 4 and 2 heads without enable_gqa


def test_sdpa_of_nested_tensors() -> None:
    parts = [torch.rand(n, 4, 16, device=WHERE, generator=torch.Generator(WHERE).manual_seed(n)) for n in (3, 5)]
    q = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    torchs: Any = F.scaled_dot_product_attention
    for got, alone in zip(ops.sdpa(q, q, q).unbind(), parts, strict=True):
        want = torchs(*[alone.transpose(0, 1)] * 3)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_sdpa_under_torch_func() -> None:
    q = Inputs(WHERE).randn(2, 7, 4, 16).transpose(1, 2)
    got, want = (
        torch.func.grad(lambda t, f=f: f(t, t, t).square().sum())(q) for f in (ops.sdpa, F.scaled_dot_product_attention)
    )
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("compiled", [False, True])
def test_sdpa_under_autocast(compiled: bool) -> None:
    """Operands of the dtype that autocast wants, whatever they came as; float64 stays."""
    q = Inputs(WHERE).randn(2, 7, 4, 16).transpose(1, 2)
    call: Any = torch.compile(ops.sdpa, fullgraph=True, backend="aot_eager") if compiled else ops.sdpa
    torchs: Any = F.scaled_dot_product_attention
    with torch.autocast(WHERE, torch.bfloat16):
        for operands in ((q, q, q), (q, q.bfloat16(), q.half()), (q.double(),) * 3):
            got, want = call(*operands), torchs(*operands)
            assert got.dtype == want.dtype
            torch.testing.assert_close(got, want, rtol=2e-2, atol=1e-2)
