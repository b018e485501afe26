"""The peers of ops in benchmarks: the PyTorch call (and the vendor library behind it) that a user would otherwise make.

A peer takes the op's arguments and computes the same, or says why it cannot, so nothing is compared with a different task.
Preparations that a peer needs outside of the timed call (a contiguous cache for SDPA) are made in `make`.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.bench import peers_conv, peers_experts, peers_pointwise
from tilewright.kernels.device.activations import ACTIVATION_FORMS

__all__ = ["NoPeer", "default_shapes", "inductor", "peer"]

Call = Callable[[], Any]


class NoPeer(ValueError):
    """PyTorch has no call for this; the message says why."""


def peer(op_name: str, args: tuple[Any, ...]) -> Call:
    """A PyTorch call that computes the same as the op. Raises NoPeer if there is none."""
    if op_name not in _PEERS:
        raise NoPeer(f"{op_name}: PyTorch has no one call for it")
    return _PEERS[op_name](*args)


def inductor(op_name: str, args: tuple[Any, ...]) -> Call:
    """The library's product, then everything that follows it as one kernel of Inductor. Raises NoPeer for other ops."""
    if op_name != "linear":
        raise NoPeer(f"{op_name}: Inductor's kernel after cuBLAS is a peer only of linear")
    x, weight, bias, activation, residual = args
    if activation == "none" and residual is None:
        raise NoPeer("linear: nothing follows the product")
    return _linear(x, weight, bias, activation, residual, _compiled)


def _after(y: Tensor, activation: str, residual: Tensor | None) -> Tensor:
    y = ACTIVATION_FORMS[activation](y)
    return y if residual is None else y + residual


@lru_cache(maxsize=1)
def _compiler(shape: torch.Size) -> Callable[..., Tensor]:
    torch.compiler.reset()  # torch.compile compiles a function for at most eight shapes
    return torch.compile(_after, dynamic=False)


def _compiled(y: Tensor, activation: str, residual: Tensor | None) -> Tensor:
    return _compiler(y.shape)(y, activation, residual)


def _linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None,
    after: Callable[[Tensor, str, Tensor | None], Tensor] = _after,
) -> Call:  # fmt: skip
    def call() -> Tensor:
        y = F.linear(x, weight, bias) if x.dim() == 2 else torch.matmul(x, weight.mT)
        return after(y, activation, residual)

    return call


def _scaled_linear(
    x: Tensor, weight: Tensor, x_scales: Tensor, w_scales: Tensor, bias: Tensor | None, activation: str,
    residual: Tensor | None, dtype: torch.dtype,
) -> Call:  # fmt: skip
    if bias is not None or activation != "none" or residual is not None:
        raise NoPeer("scaled_linear: PyTorch has no call with an epilogue")
    if x.dtype == torch.int8:
        if x.is_cuda and x.shape[0] <= 16:
            raise NoPeer("scaled_linear: torch._int_mm takes more than 16 rows")
        integers = torch._int_mm  # pyright: ignore[reportPrivateImportUsage]
        return lambda: (integers(x, weight.mT) * x_scales[:, None] * w_scales).to(dtype)
    floats = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
    return lambda: floats(x, weight.mT, x_scales[:, None], w_scales[None], out_dtype=dtype)


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Call:
    def call() -> tuple[Tensor, Tensor]:
        total = x + residual
        return F.rms_norm(total, total.shape[-1:], weight, eps), total

    return call


def _add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, want_sum: bool) -> Call:
    def call() -> tuple[Tensor, Tensor]:
        total = x + residual
        return F.layer_norm(total, total.shape[-1:], weight, bias, eps), total if want_sum else x.new_empty(0)

    return call


def _check_attention(
    op_name: str, cu_q: Tensor | None, max_q: int, max_k: int, causal: bool, left: int | None = None, right: int | None = None,
    prefix: int = 0, *bends: object,
) -> None:  # fmt: skip
    if left is not None or right is not None or prefix or any(bend is not None for bend in bends):
        raise NoPeer(f"{op_name}: SDPA has no windows, prefixes, soft caps, sinks or ALiBi without a mask tensor")
    if cu_q is not None:
        raise NoPeer(f"{op_name}: SDPA takes sequences of one length only")
    if causal and max_q not in (1, max_k):
        raise NoPeer(f"{op_name}: SDPA's causal mask is for queries that begin with the sequence")


def _attention(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, max_q: int, max_k: int, scale: float,
    causal: bool, want_lse: bool, *bends: Any,
) -> Call:  # fmt: skip
    _check_attention("attention", cu_q, max_q, max_k, causal, *bends)
    if want_lse:
        raise NoPeer("attention: SDPA gives no log-sum-exp")
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))

    def call() -> Tensor:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal and max_q > 1, scale=scale, enable_gqa=True)
        return out.transpose(1, 2)

    return call


def _biased_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float, fill: float, empty_nan: bool
) -> Call:  # fmt: skip
    if fill != -math.inf or empty_nan:
        raise NoPeer("biased_attention: SDPA masks keys with -inf, and gives zeros where a query sees none")
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    mask = bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    return lambda: F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True).transpose(1, 2)


def _attention_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_q: Tensor | None, cu_k: Tensor | None,
    max_q: int, max_k: int, scale: float, causal: bool, deterministic: bool, *bends: Any,
) -> Call:  # fmt: skip
    """The backward pass that autograd launches for SDPA: cuDNN's, faster than FlashAttention-2's wherever both were timed."""
    _check_attention("attention_backward", cu_q, max_q, max_k, causal, *bends)
    causal = causal and max_q > 1
    do, q, k, v, out = (t.transpose(1, 2) for t in (do, q, k, v, out))
    sums, aten, shared = (
        lse.unflatten(1, (q.shape[0], -1)).transpose(0, 1).contiguous(),
        torch.ops.aten,
        q.shape[1] // k.shape[1],
    )
    if not q.is_cuda:
        keys, values = (t.repeat_interleave(shared, 1) for t in (k, v))

        def on_cpu() -> tuple[Tensor, ...]:
            backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
            dq, *others = backward(do, q, keys, values, out, sums, 0.0, causal, scale=scale)
            return tuple(t.transpose(1, 2) for t in (dq, *(t.unflatten(1, (-1, shared)).sum(2) for t in others)))

        return on_cpu
    # Only outputs that do not depend on values are taken from this forward pass.
    _, shaped, ends_q, ends_k, _, _, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )
    rest = (out, sums.view(shaped.shape), seed, offset, None, ends_q, ends_k, max_q, max_k, 0.0, causal)
    return lambda: aten._scaled_dot_product_cudnn_attention_backward(do, q, k, v, *rest, scale=scale)


def _paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lens: Tensor, cu_q: Tensor,
    max_q: int, scale: float, window: int | None, k_scale: Tensor | None, v_scale: Tensor | None, sinks: Tensor | None,
) -> Call:  # fmt: skip
    """SDPA over keys and values without pages; if lengths differ, over the same number of sequences of their mean length."""
    if window is not None:
        raise NoPeer("paged_attention: SDPA has no sliding window without a mask tensor")
    if sinks is not None:
        raise NoPeer("paged_attention: SDPA has no sinks")
    if k_scale is not None or v_scale is not None:
        raise NoPeer("paged_attention: SDPA takes no codes of 8 bits")
    batch, length = lens.shape[0], int(lens[0])
    if bool((lens != length).any()):
        # SDPA takes sequences of one length only. It gets the same number of sequences of the mean length, which a server
        # could not do.
        if max_q > 1:
            raise NoPeer("paged_attention: SDPA takes sequences of one length only")
        length = round(int(lens.sum()) / batch)
    if q.shape[0] != batch * max_q:
        raise NoPeer("paged_attention: SDPA takes as many queries of each sequence only")
    if max_q not in (1, length):
        raise NoPeer("paged_attention: SDPA's causal mask is for queries that begin with the sequence")
    k, v = (cache[table.long()].transpose(2, 3).flatten(1, 2).transpose(1, 2)[:, :, :length] for cache in (k_cache, v_cache))
    k, v = k.contiguous(), v.contiguous()  # a cache without pages, which SDPA would read
    heads = q.view(batch, max_q, q.shape[1], q.shape[2]).transpose(1, 2)
    return lambda: F.scaled_dot_product_attention(heads, k, v, is_causal=max_q > 1, scale=scale, enable_gqa=True)


def _cross_entropy(logits: Tensor, targets: Tensor, ignore_index: int, smoothing: float, z_loss: float) -> Call:
    if z_loss:
        raise NoPeer("cross_entropy: PyTorch's function has no z-loss")
    options: Any = {"ignore_index": ignore_index, "label_smoothing": smoothing, "reduction": "none"}
    return lambda: F.cross_entropy(logits, targets, **options)


def _cross_entropy_gradient(
    logits: Tensor, targets: Tensor, scale: Tensor, ignore_index: int, smoothing: float, z_loss: float
) -> Call:
    if z_loss or smoothing:
        raise NoPeer("cross_entropy_gradient: the calls of autograd are listed here only without z-loss and label smoothing")
    aten = torch.ops.aten

    def call() -> tuple[Tensor, Tensor]:
        logs = torch.log_softmax(logits, -1)
        losses, total = aten.nll_loss_forward(logs, targets, None, 0, ignore_index)
        back = aten.nll_loss_backward(scale.to(logs.dtype), logs, targets, None, 0, ignore_index, total)
        return losses, aten._log_softmax_backward_data(back, logs, -1, logits.dtype)

    return call


def _layer_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, eps: float, stats: Tensor | None) -> Call:
    mean, scale = torch.ops.aten.native_layer_norm(x, [x.shape[-1]], weight, weight, eps)[1:]
    wanted = [True, True, True]
    return lambda: torch.ops.aten.native_layer_norm_backward(dy, x, [x.shape[-1]], mean, scale, weight, weight, wanted)


def _layer_norm_stats(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Call:
    return lambda: torch.ops.aten.native_layer_norm(x, [x.shape[-1]], weight, bias, eps)


def _rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, dmore: Tensor | None, eps: float) -> Call:
    if dmore is not None:
        raise NoPeer("rms_norm_backward: PyTorch's function adds no second gradient of x")
    shape, wanted = [x.shape[-1]], [True, True]
    if not x.is_cuda:  # torch has the fused gradient on a GPU only
        x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
        y = F.rms_norm(x, shape, weight, eps)
        return lambda: torch.autograd.grad(y, (x, weight), dy, retain_graph=True)
    scale = torch.ops.aten._fused_rms_norm(x, shape, weight, eps)[1]
    return lambda: torch.ops.aten._fused_rms_norm_backward(dy, x, shape, scale, weight, wanted)


_PEERS: dict[str, Callable[..., Call]] = {
    **peers_conv.PEERS,
    **peers_experts.PEERS,
    **peers_pointwise.PEERS,
    "add_layer_norm": _add_layer_norm,
    "add_rms_norm": _add_rms_norm,
    "attention": _attention,
    "attention_backward": _attention_backward,
    "biased_attention": _biased_attention,
    "cross_entropy": _cross_entropy,
    "cross_entropy_gradient": _cross_entropy_gradient,
    "gelu_mul": lambda gate, up, approximate: lambda: F.gelu(gate, approximate="tanh" if approximate else "none") * up,
    "layer_norm": lambda x, weight, bias, eps: lambda: F.layer_norm(x, x.shape[-1:], weight, bias, eps),
    "layer_norm_backward": _layer_norm_backward,
    "layer_norm_stats": _layer_norm_stats,
    "linear": _linear,
    "log_softmax": lambda x: lambda: torch.log_softmax(x, -1),
    "log_softmax_backward": lambda dy, y: lambda: torch.ops.aten._log_softmax_backward_data(dy, y, -1, y.dtype),
    "paged_attention": _paged_attention,
    "permute": lambda x, dims: lambda: x.permute(dims).contiguous(),
    "reduce_max": lambda x: lambda: x.max(1),
    "reduce_sum": lambda x, mean: lambda: x.mean(1) if mean else x.sum(1),
    "rms_norm": lambda x, weight, eps: lambda: F.rms_norm(x, x.shape[-1:], weight, eps),
    "rms_norm_backward": _rms_norm_backward,
    "scaled_linear": _scaled_linear,
    "silu_mul": lambda gate, up: lambda: F.silu(gate) * up,
    "softmax": lambda x: lambda: torch.softmax(x, -1),
    "softmax_backward": lambda dy, y: lambda: torch.ops.aten._softmax_backward_data(dy, y, -1, y.dtype),
    "token_logprobs": lambda logits, ids: lambda: torch.log_softmax(logits.float(), -1).gather(1, ids[:, None]),
}

_ROWS = ("M=4096 N=1024", "M=8192 N=4096", "M=8192 N=16384", "M=4096 N=131072", "M=64 N=4096")
_LOGITS = ("M=4096 N=131072", "M=8192 N=32000", "M=8192 N=50257", "M=65536 N=1000", "M=2048 N=262144")
_IMAGES = ("B=32 M=4096 N=320", "B=256 M=3136 N=64", "B=256 M=49 N=2048", "B=32 M=4096 N=320 first=true")
_REDUCED = (
    *(f"M={m} N={n} rows=true" for m, n in ((4096, 131072), (131072, 4096), (1 << 28, 1))),
    *("M=4096 N=131072", "M=131072 N=512"),
)
_PRODUCTS = ("M=64 N=4096 K=4096", "M=4096 N=4096 K=4096", "M=4096 N=14336 K=4096", "M=8192 N=8192 K=8192")
# 16k tokens (or one sequence), 2048 = heads x head dim; then grouped heads, as in models of 8B.
_ATTENTION = tuple(
    f"B={max(1, 16384 // keys)} KV={keys} {heads} causal={causal}"
    for causal in ("false", "true")
    for heads, lengths in (
        *((f"H={2048 // d} G={2048 // d} D={d}", (512, 1024, 2048, 4096, 8192, 16384, 32768)) for d in (128, 64, 256)),
        ("H=32 G=8 D=128", (512, 1024, 2048, 4095, 4096, 8192, 16384, 32768)),
    )
    for keys in lengths
)
_LONG_ATTENTION = ("B=2 KV=8192 H=16 G=16", "B=1 KV=16384 H=16 G=16", "B=1 KV=16384", "B=2 KV=8192 H=32 G=32 D=64")
_SHAPES: dict[str, tuple[str, ...]] = {
    **peers_conv.SHAPES,
    **peers_experts.SHAPES,
    **peers_pointwise.SHAPES,
    "attention": _ATTENTION,
    "attention_backward": _ATTENTION,
    # Padded texts (a mask of keys), windows of an image, relative positions.
    "biased_attention": (
        *("B=32 KV=128 mask=true", "B=8 KV=512 mask=true", "B=8 KV=512", "B=1 KV=4096 H=16 bias=heads"),
        *("B=256 KV=49 H=6 D=32 bias=heads", "B=8 KV=512 H=8 bias=heads", "B=8 Q=64 KV=512 H=8 bias=each"),
    ),
    "block_scaled_linear": _PRODUCTS,
    "cast_linear": _PRODUCTS,
    "batch_norm_backward": _IMAGES,
    "batch_statistics": _IMAGES,
    "channel_affine": _IMAGES,
    "channel_sums": _IMAGES,
    "cross_entropy": _LOGITS,
    "cross_entropy_gradient": _LOGITS,
    "cross_entropy_gradient_in_place": _LOGITS,
    "layer_norm_backward": tuple(
        f"{rows}{stats}"
        for rows in (*_ROWS, "M=8192 N=8192", "M=2048 N=262144")
        for stats in ("", " stats=true")  # what the forward pass kept, or not
    ),
    "kv_cache_write": ("T=1", "T=256", "T=8192"),
    "linear": (
        *(f"M={m} N=4096 K=4096" for m in (1, 16, 64, 1024, 8192)),
        *(f"M={m} N=14336 K=4096" for m in (1, 64, 256, 4096)),
        *("M=64 N=4096 K=14336", "M=4096 N=4096 K=14336", "M=8192 N=8192 K=8192"),
        *(f"M={n} N={n} K={n}" for n in (1024, 2048, 2049, 4095, 4096)),
    ),
    "mixed_linear": tuple(
        f"{shape} {format}"
        for format in ("format=int8", "format=int4 group=128 zeros=true")
        for shape in (*(f"M={m} N=4096 K=4096" for m in (1, 16, 64, 512, 4096)), "M=1 N=28672 K=4096", "M=1 N=4096 K=14336")
    ),
    # Limited by the tensor cores, by the cache's bytes, by latency; then the absorbed form for a prompt.
    "mla_attention": (
        *("B=64 KV=4096", "B=128 KV=4096", "B=128 KV=8192", "B=64 KV=4096 Q=2"),
        *("B=16 KV=8192", "B=32 KV=2048", "B=1 KV=65536"),
        *("B=128 KV=4096 H=16", "B=128 KV=4096 H=64", "B=64 KV=20000 H=16 ragged=true", "B=1 KV=8192", "B=2 KV=2048 Q=1024"),
    ),
    "mla_rope_write": ("T=1", "T=128", "T=8192"),
    # One token of each of many requests, and a prompt; q, k and v of an 8B model, its feed-forward layer.
    "lora_shrink": tuple(
        f"M={m} K={k} parts={parts} adapters=64" for m in (16, 64, 256, 2048) for k, parts in ((4096, 3), (14336, 1))
    ),
    "lora_expand_add": tuple(f"M={m} N={n} adapters=64" for m in (16, 64, 256, 2048) for n in (4096, 14336)),
    "lora_expand_silu_mul": tuple(f"M={m} N=24576 adapters=64" for m in (16, 64, 256, 2048)),
    "mx_linear": _PRODUCTS,
    "capped_paged_attention": ("B=1 KV=8192", "B=64 KV=4096", "B=64 KV=20000 ragged=true", "B=1 KV=2048 Q=2048"),
    "paged_attention": (
        *("B=1 KV=8192", "B=16 KV=8192", "B=64 KV=8192", "B=256 KV=1024", "B=256 KV=1024 H=16"),
        *("B=1 KV=131072", "B=64 KV=1000", "B=256 KV=300", "B=64 KV=20000 ragged=true", "B=64 KV=4096 Q=4"),
        *(f"B=64 KV=4096 S={page}{codes}" for page in (16, 64) for codes in ("", " cache=int8", " cache=fp8")),
        *("B=1 KV=2048 Q=2048", "B=8 KV=2048 Q=2048"),
        # A prompt's chunk and decoding rows: in one launch, and each alone.
        *("B=64 KV=4096 chunk=2048", "B=1 KV=4096 chunk=2048", "B=63 KV=4096"),
    ),
    **dict.fromkeys(
        ("adamw", "adamw_8bit", "grad_squares", "momentum", "pack_tensors", "sgd"),
        ("M=1 N=4096", "M=13 N=4096", "M=100 N=1000"),  # a layer of an 8B model; tensors that end within a block
    ),
    "clip_scale": ("M=3700", "M=147000"),  # parameters / 4096
    "permute": (
        *("M=8192 N=8192", "M=4096 N=131072", "M=8192 N=4097", "M=4000 N=12000 B=4"),
        "M=8192 N=8192 dtype=float32",
        *("M=3136 N=64 B=512", "M=64 N=3136 B=512", "M=2048 N=512 rows=true"),
    ),
    "quantize_keys_values": ("B=2 KV=8192 G=16", "B=1 KV=16384", "B=1 KV=16384 format=int8"),
    "reduce_max": _REDUCED,
    "reduce_sum": _REDUCED,
    "rope": ("T=1", "T=256", "T=16384"),
    "rope_kv_write": ("T=1", "T=256", "T=8192"),
    "sample": ("M=1", "M=64", "M=256 top_p=0.95", "M=256 top_k=50"),
    "scaled_attention": tuple(f"{shape} causal={causal}" for causal in ("false", "true") for shape in _LONG_ATTENTION),
    "scaled_linear": tuple(
        f"{shape} dtype={dtype}"
        for dtype in ("int8", "float8_e4m3fn")
        for shape in (
            *(f"M={m} N=4096 K=4096" for m in (1, 64, 512, 2048, 8192)),
            *(f"M={m} N=14336 K=4096" for m in (64, 256, 4096)),
            *("M=64 N=4096 K=14336", "M=2048 N=4096 K=14336", "M=8192 N=8192 K=8192"),
        )
    ),
    "edit_logits": ("M=1", "M=256"),
    "minhash": ("D=65536 L=512", "D=64 L=65536"),
    "band_keys": ("D=1048576",),
    "decode_inputs": ("M=1", "M=256"),
    "mask_logits": ("M=1", "M=256"),
    "token_logprobs": ("M=1", "M=256"),
    "top_logprobs": ("M=1", "M=64"),
}


def default_shapes(op_name: str) -> tuple[str, ...]:
    """The dimensions for which an op is measured if none are given, as written on a command line."""
    return _SHAPES.get(op_name, _ROWS)
