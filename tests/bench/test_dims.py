"""Ops and dimensions as words; peers compute the same as the op; counters are read from Nsight Compute's CSV."""

import re
import subprocess
from itertools import product
from typing import Any

import pytest
import torch

from tests.conformance import errors, flat
from tilewright.bench import counters
from tilewright.bench.counters import counters_of, parse
from tilewright.bench.dims import find_op, parse_dims
from tilewright.bench.op import checked, geomean, shapes_of, unit_of
from tilewright.bench.peers import NoPeer, default_shapes, peer
from tilewright.op import Inputs, Op
from tilewright.ops import ALL

LINEAR = find_op("matmul")
PEERLESS = {
    "adamw",
    "adamw_8bit",
    "add_rms_norm_quantize",
    "band_keys",
    "batch_norm_backward",
    "batch_statistics",
    "block_scaled_linear",
    "capped_paged_attention",
    "cast_linear",
    "channel_affine",
    "channel_sums",
    "clip_scale",
    "conv_codes",
    "cross_entropy_gradient_in_place",
    "decode_inputs",
    "dropout",
    "edit_logits",
    "grad_squares",
    "grouped_block_scaled_linear",
    "grouped_mixed_linear",
    "grouped_scaled_linear",
    "kv_cache_write",
    "layer_norm_quantize",
    "lora_expand_add",
    "lora_expand_silu_mul",
    "lora_shrink",
    "minhash",
    "mask_logits",
    "mixed_linear",
    "mla_attention",
    "mla_rope_write",
    "momentum",
    "mx_linear",
    "pack_tensors",
    "quantize_blocks",
    "quantize_both_ways",
    "quantize_fold",
    "quantize_keys_values",
    "quantize_mx",
    "quantize_rows",
    "quantize_static",
    "quantize_tensor",
    "rms_norm_quantize",
    "rope",
    "rope_kv_write",
    "sample",
    "scale_in_place",
    "scaled_attention",
    "sgd",
    "silu_mul_quantize",
    "top_logprobs",
}
SMALL = {"M": 3, "N": 32, "K": 32, "T": 5, "B": 2, "KV": 40, "H": 4, "G": 2, "D": 16, "C": 6, "O": 10, "X": 9}


@pytest.mark.parametrize(
    ("op", "words", "message"),
    [
        ("matmull", [], "there is no operator 'matmull': did you mean matmul"),
        ("linear", ["M=1", "N=2"], "K is missing; the dimensions are M=... N=... K=... dtype=bfloat16"),
        ("linear", ["M=1", "N=2", "KK=3"], "no dimension 'KK': did you mean K"),
        ("linear", ["M=1", "N=2", "K=x"], "K is 'x', wanted an integer"),
        ("linear", ["M=1", "N=2", "K=-1"], "K is -1, wanted 0 or more"),
        ("linear", ["M=1", "M=2", "N=2", "K=3"], "M is given twice"),
        ("linear", ["M"], "KEY=VALUE, got 'M'"),
        ("linear", ["M=1", "N=2", "K=3", "dtype=bf61"], "wanted a dtype: did you mean bf16"),
        ("linear", ["M=1", "N=2", "K=3", "layout=xx"], "wanted nt, nn or tn"),
        ("softmax", ["M=1000000", "N=1000000"], "GiB, wanted at most"),
        ("paged_attention", ["B=1", "KV=4", "Q=9"], "1 <= Q <= KV"),
        ("paged_attention", ["B=1", "KV=4", "chunk=9"], "chunk 9 and KV 4"),
    ],
)
def test_misspelled(op: str, words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        checked(find_op(op), words)


def test_words_become_keywords() -> None:
    words = ["M=4096", "N=8", "K=16", "dtype=fp16", "bias=true", "activation=relu"]
    want = {"M": 4096, "N": 8, "K": 16, "dtype": torch.float16, "bias": True, "activation": "relu"}
    assert parse_dims(LINEAR, words) == want
    assert parse_dims(find_op("paged_attention"), ["B=1", "KV=8", "window=none"])["window"] is None


@pytest.mark.parametrize("op", ALL, ids=lambda op: op.name)
def test_default_shapes_are_dimensions_of_the_op(op: Op) -> None:
    found = shapes_of(op, [], None)
    assert len(found) == len(default_shapes(op.name)) > 0


def test_shapes_by_option() -> None:
    assert shapes_of(LINEAR, [], "M=1,N=2,K=3;M=4,N=5,K=6;") == [["M=1", "N=2", "K=3"], ["M=4", "N=5", "K=6"]]
    with pytest.raises(ValueError, match="--shapes cannot be combined with"):
        shapes_of(LINEAR, ["M=1"], "M=1,N=2,K=3")


def test_integers_have_a_roof() -> None:
    """Copies of them, that is: whatever the unit, bytes are what counts."""
    op = find_op("permute")
    assert op.make is not None
    x, dims = op.make(Inputs("meta"), **parse_dims(op, ["M=4", "N=6", "int8=true"]))
    assert (x.dtype, unit_of((x, dims))) == (torch.int8, "bf16")


@pytest.mark.parametrize(
    ("name", "words", "unit"),
    [
        ("linear", ["dtype=fp16"], "fp16"),
        ("scaled_linear", ["dtype=int8"], "int8"),
        ("scaled_linear", ["dtype=fp8"], "fp8"),
        ("scaled_linear", ["dtype=float8_e5m2"], "fp8"),
        ("block_scaled_linear", [], "fp8"),
        ("mx_linear", [], "fp8"),
        ("mixed_linear", ["format=int8"], "bf16"),
    ],
)
def test_products_have_the_roof_of_what_they_multiply(name: str, words: list[str], unit: str) -> None:
    op = find_op(name)
    assert op.make is not None
    args = op.make(Inputs("meta"), **parse_dims(op, ["M=64", "N=128", "K=256", *words]))
    assert unit_of(args) == unit
    assert unit_of(args, ("bf16", "fp16")) == (unit if unit == "fp16" else "bf16")


@pytest.mark.parametrize("op", ALL, ids=lambda op: op.name)
@pytest.mark.parametrize("decode", [True, False])
def test_peers_compute_the_same(op: Op, decode: bool) -> None:
    make: Any = op.make
    dims = parse_dims(op, [f"{k}={v}" for k, v in SMALL.items() if k in make.__code__.co_varnames])
    if (make.__kwdefaults__ or {}).get("dtype", torch.int8).itemsize > 1:
        dims["dtype"] = torch.float32
    if op.name == "paged_attention" and not decode:
        dims["Q"] = dims["KV"]
    args = make(Inputs(seed=2), **dims)
    if op.name in PEERLESS:
        with pytest.raises(NoPeer, match=f"{op.name}: PyTorch has no one call"):
            peer(op.name, args)
        return
    theirs = flat(peer(op.name, args)())
    ours = flat(op.reference(*args))
    got = theirs[0].transpose(1, 2).reshape(ours[0].shape) if op.name == "paged_attention" else theirs[0].reshape(ours[0].shape)
    assert errors(got, ours[0])[0] < (1e-4 if ours[0].dtype == torch.float32 else 8e-3)


@pytest.mark.parametrize("causal", [False, True])
def test_the_peer_of_attentions_gradients_has_all_of_them(causal: bool) -> None:
    op: Any = find_op("attention_backward")
    args = op.make(Inputs(seed=2), B=2, KV=24, H=4, G=2, D=16, causal=causal, dtype=torch.float32)
    for theirs, ours in zip(peer(op.name, args)(), op.reference(*args), strict=False):  # the last is of sinks
        torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)


def test_attention_is_measured_with_every_length_and_head_dim() -> None:
    shapes = default_shapes("attention")
    assert shapes == default_shapes("attention_backward")
    for causal, dim, keys in product(("false", "true"), (64, 128, 256), (2**i for i in range(9, 16))):
        assert any(f" KV={keys} H={2048 // dim} G={2048 // dim} D={dim} causal={causal}" in shape for shape in shapes)
        assert any(f" KV={keys} H=32 G=8 D=128 causal={causal}" in shape for shape in shapes)


def test_peers_that_there_cannot_be() -> None:
    for name in ("attention", "attention_backward"):
        make: Any = find_op(name).make
        for option, words in (({"window": 4}, "no windows"), ({"packed": True}, "one length"), ({"Q": 3}, "causal mask")):
            with pytest.raises(NoPeer, match=f"{name}: .*{words}"):
                peer(name, make(Inputs(), B=1, KV=8, H=2, G=1, D=16, causal=True, **option))
    attention: Any = find_op("paged_attention").make
    with pytest.raises(NoPeer, match="sliding window"):
        peer("paged_attention", attention(Inputs(), B=1, KV=8, H=2, G=1, D=16, window=4))
    with pytest.raises(NoPeer, match="causal mask"):
        peer("paged_attention", attention(Inputs(), B=1, KV=8, Q=2, H=2, G=1, D=16))
    with pytest.raises(NoPeer, match="as many queries"):
        peer("paged_attention", attention(Inputs(), B=3, KV=8, H=2, G=1, D=16, chunk=4))
    with pytest.raises(NoPeer, match="one length"):
        peer("paged_attention", attention(Inputs(), B=3, KV=400, Q=2, H=2, G=1, D=16, ragged=True))
    with pytest.raises(NoPeer, match="no one call"):
        peer("sample", ())


def test_the_peer_of_ragged_decoding_reads_as_many_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths of 2, 201 and 400 are SDPA's three of 201."""
    make: Any = find_op("paged_attention").make
    call = peer("paged_attention", make(Inputs(seed=2), B=3, KV=400, H=2, G=1, D=16, ragged=True))
    given: list[tuple[int, ...]] = []

    def attend(*tensors: torch.Tensor, **_: Any) -> torch.Tensor:
        given.extend(tuple(t.shape) for t in tensors)
        return tensors[0]

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    call()
    assert given == [(3, 2, 1, 16), (3, 1, 201, 16), (3, 1, 201, 16)]


def test_geomean() -> None:
    assert geomean([{"ratio": 2.0}, {"ratio": 0.5}, {}]) == 1.0
    assert geomean([{}]) is None


# As `ncu --csv` prints it (Nsight Compute CLI documentation, "Output Pages"): a line a kernel and metric.
CSV = """==PROF== Connected to process 42
hello from the program
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"
"0","42","python","127.0.0.1","_tile_kernel(x)","1","7","(128, 1, 1)","(4, 1, 1)","0","9.0","Command line profiler metrics","dram__bytes.sum","Mbyte","1,234.5"
"0","42","python","127.0.0.1","_tile_kernel(x)","1","7","(128, 1, 1)","(4, 1, 1)","0","9.0","Command line profiler metrics","lts__t_sector_hit_rate.pct","%","61.25"
"0","42","python","127.0.0.1","_tile_kernel(x)","1","7","(128, 1, 1)","(4, 1, 1)","0","9.0","Command line profiler metrics","sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active","%","n/a"
"1","42","python","127.0.0.1","_tile_kernel(x)","1","7","(128, 1, 1)","(4, 1, 1)","0","9.0","Command line profiler metrics","dram__bytes.sum","Kbyte","2"
"""  # noqa: E501


def test_counters_are_parsed() -> None:
    assert parse(CSV) == {
        "_tile_kernel": {"dram bytes": 1234.5e6, "l2 hit %": 61.25},
        "_tile_kernel #2": {"dram bytes": 2000.0},
    }
    assert parse("==ERROR== nothing") == {}


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", "lets only administrators read counters"),
        ("==WARNING== No kernels were profiled.", "reported no counters .exit code 1.: ==WARNING== No kernels"),
    ],
)
def test_counters_that_cannot_be_read_have_a_reason(monkeypatch: pytest.MonkeyPatch, output: str, words: str) -> None:
    monkeypatch.setattr(counters.shutil, "which", lambda name: "/bin/ncu")
    done = subprocess.CompletedProcess([], 1, stdout=output, stderr="")
    monkeypatch.setattr(counters.subprocess, "run", lambda *args, **kwargs: done)
    found = counters_of("linear", ["M=1"], None)
    assert isinstance(found, str)
    assert re.search(words, found)


def test_no_nsight_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters.shutil, "which", lambda name: None)
    monkeypatch.setattr(counters, "_PLACES", ())
    assert "not installed" in str(counters_of("linear", ["M=1"], None))
