"""Quantise the keys and values of an attention to 8-bit codes, in one launch.

    k codes, scale    blocks of 128 keys of a head, of k - mean: code = round(. / scale), scale = max |.| / largest;
                      mean: of a sample of the head's keys
    v codes, scale    fp8 only: blocks of 128 keys of a head; scale: the smallest power of two that is at least max |v| /
    largest

    k and v [B, SK, G, D] of bf16, fp16 or fp32  ->  k codes [B, G, PK, D], v codes [B, G, D, PK], scales [B, G, PK / 128];
    codes int8 (largest 127) or float8 e4m3 (448), scales float32; PK is SK rounded up to a multiple of 128, padded with zeros

**Smoothing** (Zhang et al., "SageAttention", 2024). Keys of real models have channels that are far from zero for every token.
With 8 bits relative to those, little precision is left for the differences between keys. Subtracting one vector from all keys
of a head changes all scores of a query by the same number, and the softmax does not depend on that. This holds for any vector.
So the mean is taken over up to 32 evenly spaced keys: it is 0.18 standard deviations of a key from the mean of all, and needs
no pass of its own. (The log-sum-exp does depend on it: attention over codes returns none.)

**Layout.** 8-bit products on Hopper need both operands contiguous in the summed dimension, so values are transposed. Each 16
keys are stored in the order 0 1 8 9, 2 3 10 11, 4 5 12 13, 6 7 14 15, so that the weights of Hopper's scores are the operand of
the next product in the registers where they already are (layout.key_order).

With int8 the values are not quantised: their codes and scales are empty. Scales are at least 2^-40 / largest, so that the
product of two is not a denormal number. A block that contains a NaN or an infinity has the scale NaN and zero codes; if the
sample of a head contains one, this applies to all keys of the head.

Limited by bytes. Not supported: packed sequences, head dims that are not multiples of 16, fp8 before sm_89.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.formats import FORMATS
from tilewright.hw.device import Device
from tilewright.hw.roofline import Cost
from tilewright.kernels.attention.fp8.inputs import quantize_keys_values_arguments
from tilewright.kernels.attention.fp8.layout import KEYS, SMALLEST, key_order, padded_rows
from tilewright.kernels.device.quantize import UNFUSED, encode_tile, magnitude
from tilewright.kernels.launch.pdl import release
from tilewright.kernels.launch.shapes import next_pow2
from tilewright.op import Example, Impl, Inputs, Op
from tilewright.tune.space import Config, Space

__all__ = ["FORMATS_OF_ATTENTION", "quantize_keys_values_op"]

# B sequences, S queries, H query heads, G key/value heads, D head dim, N rows per block

FORMATS_OF_ATTENTION = ("fp8", "int8")
SAMPLE = 32  # keys
Coded = tuple[Tensor, Tensor, Tensor, Tensor]

# ---- reference


def _blocks(x: Tensor) -> Tensor:
    """[B, SK, G, D] as float32 blocks [B, G, PK / 128, 128, D], padded with zeros."""
    x = x.float().transpose(1, 2)
    x = torch.nn.functional.pad(x, (0, 0, 0, padded_rows(x.shape[2]) - x.shape[2]))
    return x.unflatten(2, (-1, KEYS))


def _encode(blocks: Tensor, format: str, power: bool = False) -> tuple[Tensor, Tensor]:
    """(codes, scales) of blocks [.., N, D]."""
    form = FORMATS[format]
    amax = blocks.abs().amax((-2, -1)).clamp_min(SMALLEST)
    finite = amax.isfinite()
    amax = amax.where(finite, 1.0)
    scale, inverse = amax / form.largest, torch.full_like(amax, form.largest) / amax  # `largest / amax` would round twice
    if power:
        mantissa, exponent = torch.frexp(scale)
        scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
        inverse = 1.0 / scale
    scaled = (blocks * inverse[..., None, None]).where(finite[..., None, None], 0.0)
    codes = (scaled.round() if form.dtype == torch.int8 else scaled).clamp(-form.largest, form.largest).to(form.dtype)
    return codes, scale.where(finite, float("nan"))


def _sample_mean(k: Tensor) -> Tensor:
    """float32 [B, 1, G, D]: the mean of up to SAMPLE evenly spaced keys of [B, SK, G, D]."""
    keys = k.shape[1]
    count = min(keys, SAMPLE)
    at = torch.arange(count, device=k.device) * keys // max(count, 1)
    return k[:, at].float().sum(1, keepdim=True) / max(count, 1)


def _reference(k: Tensor, v: Tensor, format: str) -> Coded:
    k_codes, k_scale = _encode(_blocks(k.float() - _sample_mean(k)), format)
    if format != "fp8":
        return k_codes.flatten(2, 3), k_codes.new_empty(0), k_scale, k_scale.new_empty(0)
    v_codes, v_scale = _encode(_blocks(v), format, power=True)
    v_codes = v_codes.flatten(2, 3)
    # Some devices do not support indexing of 8-bit floats.
    v_codes = v_codes.view(torch.uint8)[:, :, key_order(v_codes.shape[2], v.device)].mT.contiguous().view(v_codes.dtype)
    return k_codes.flatten(2, 3), v_codes, k_scale, v_scale


def _fake(k: Tensor, v: Tensor, format: str) -> Coded:
    batch, keys, groups, dim = k.shape
    padded = padded_rows(keys)
    coded = format == "fp8"

    def codes(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=FORMATS[format].dtype, device=k.device)

    def scales(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=k.device)

    return (
        codes(batch, groups, padded, dim),
        codes(batch, groups, dim, padded) if coded else codes(0),
        scales(batch, groups, padded // KEYS),
        scales(batch, groups, padded // KEYS) if coded else scales(0),
    )


# ---- cost, space and examples


def _cost(k: Tensor, v: Tensor, format: str) -> Cost:
    read = (k, v) if format == "fp8" else (k,)
    written = _fake(k.to("meta"), v.to("meta"), format)
    return Cost(flops=3 * sum(t.numel() for t in read), bytes=sum(t.nbytes for t in (*read, *written)))


class Problem(NamedTuple):
    """All properties that a config may depend on."""

    dtype: torch.dtype
    head_dim: int
    format: str


def _refuse(device: Device, problem: Problem) -> str | None:
    if problem.format == "fp8" and device.arch < 89:
        return f"fp8 needs sm_89 or newer, which converts to it; this is sm_{device.arch}, use int8 here"
    return None


def _default(device: Device, problem: Problem) -> Config:
    return {"num_warps": 4 if problem.head_dim <= 128 else 16}


def _config_refusal(device: Device, problem: Problem, config: Config) -> str | None:
    if problem.head_dim > 128 and config["num_warps"] < 16:
        return "a block of keys and its sample need more registers than there are: head dims above 128 need 16 warps"
    return None


SPACE = Space(default=_default, axes={"num_warps": (4, 8, 16)}, refusal=_config_refusal)


@Example.of
def _example(
    inputs: Inputs, format: str, keys: int, heads: int = 1, dim: int = 64, batch: int = 1, dtype: torch.dtype = torch.bfloat16,
    merged: bool = False, offset: float = 0.0,
) -> tuple[object, ...]:  # fmt: skip
    """merged: k and v are views of one projection. offset: added to all keys."""
    if merged:
        k, v = inputs.randn(batch, keys, 2 * heads, dim, dtype=dtype).split(heads, 2)
    else:
        k, v = (inputs.randn(batch, keys, heads, dim, dtype=dtype) for _ in range(2))
    return k + offset if offset else k, v, format


EXAMPLES = (
    _example("ragged", "fp8", 130),
    _example("merged", "fp8", 129, 2, 128, merged=True),
    _example("offset", "fp8", 257, offset=20.0, dtype=torch.float16),
    _example("int8", "int8", 100, 2, batch=2, offset=5.0),
    _example("int8 wide", "int8", 129, dim=256),
    _example("narrow", "fp8", 20, dim=48, dtype=torch.float32),
    _example("one", "int8", 1, dim=16),
    _example("no keys", "fp8", 0),
)

# ---- kernel


@triton.jit
def _scales(bits, LARGEST: tl.constexpr, POWER: tl.constexpr):
    """(scale, inverse) from the bits of the largest magnitude; for NaN and infinity (NaN, 0). POWER: the next power of two."""
    finite = bits < 0x7F800000
    amax = tl.where(finite, tl.maximum(bits, 0x2B800000), 0x3F800000).to(tl.float32, bitcast=True)  # 2^-40 at least
    scale = tl.div_rn(amax, LARGEST)
    inverse = tl.div_rn(tl.zeros_like(amax) + LARGEST, amax)
    if POWER:
        scale = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
        inverse = tl.div_rn(1.0, scale)
    return tl.where(finite, scale, float("nan")), tl.where(finite, inverse, 0.0)


@triton.jit
def _rows(x_ptr, rows, limit, strides, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of one head, zeros beyond `limit` and D. strides: the stride of a row."""
    cols = tl.arange(0, BLOCK_D)[None, :]
    at = rows[:, None]
    return tl.load(x_ptr + at.to(tl.int64) * strides + cols, mask=(at < limit) & (cols < D), other=0.0).to(tl.float32)


@triton.jit
def _store_rows(codes_ptr, rows, codes, D: tl.constexpr, BLOCK_D: tl.constexpr):
    cols = tl.arange(0, BLOCK_D)[None, :]
    tl.store(codes_ptr + rows[:, None].to(tl.int64) * D + cols, codes, mask=cols < D)


@triton.jit
def _keys(
    x_ptr, codes_ptr, scale_ptr, head, block, blocks, keys, row_stride,
    LARGEST: tl.constexpr, SAMPLE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    count = tl.minimum(keys, SAMPLE)
    sampled = tl.arange(0, SAMPLE)
    at = tl.where(sampled < count, (sampled.to(tl.int64) * keys // count).to(tl.int32), keys)
    mean = tl.sum(_rows(x_ptr, at, keys, row_stride, D, BLOCK_D), axis=0) / count
    rows = block * 128 + tl.arange(0, 128)
    x = _rows(x_ptr, rows, keys, row_stride, D, BLOCK_D)
    x = tl.where(rows[:, None] < keys, x - mean[None, :], 0.0)
    scale, inverse = _scales(tl.max(tl.max(magnitude(x), axis=1), axis=0), LARGEST, False)
    codes = encode_tile(x, inverse, codes_ptr.dtype.element_ty)
    _store_rows(codes_ptr, (head * blocks + block) * 128 + tl.arange(0, 128), codes, D, BLOCK_D)
    tl.store(scale_ptr + head * blocks + block, scale)


@triton.jit
def _values(
    x_ptr, codes_ptr, scale_ptr, head, block, blocks, keys, row_stride,
    LARGEST: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    place = tl.arange(0, 128)
    of_16 = place % 16
    # layout.key_order
    rows = block * 128 + place - of_16 + of_16 // 4 * 2 + of_16 % 2 + of_16 % 4 // 2 * 8
    x = _rows(x_ptr, rows, keys, row_stride, D, BLOCK_D)
    scale, inverse = _scales(tl.max(tl.max(magnitude(x), axis=1), axis=0), LARGEST, True)
    codes = tl.trans(encode_tile(x, inverse, codes_ptr.dtype.element_ty))
    channel = tl.arange(0, BLOCK_D)[:, None]
    cols = (block * 128 + place)[None, :]
    tl.store(codes_ptr + (head * D + channel).to(tl.int64) * (blocks * 128) + cols, codes, mask=channel < D)
    tl.store(scale_ptr + head * blocks + block, scale)


@triton.jit(do_not_specialize=["keys", "G", "blocks", "of_keys"])
def quantize_keys_values_kernel(
    k_ptr, v_ptr, k_codes_ptr, v_codes_ptr, k_scale_ptr, v_scale_ptr, keys, G, blocks, of_keys,
    k_batch_stride, k_row_stride, k_head_stride, v_batch_stride, v_row_stride, v_head_stride,
    LARGEST: tl.constexpr, SAMPLE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A program quantises 128 rows of a head: of_keys programs for keys, and as many for values if they are coded."""
    release()
    program = tl.program_id(0)
    if program < of_keys:
        head = program // blocks
        start = k_ptr + (head // G).to(tl.int64) * k_batch_stride + (head % G).to(tl.int64) * k_head_stride
        _keys(start, k_codes_ptr, k_scale_ptr, head, program % blocks, blocks, keys, k_row_stride, LARGEST, SAMPLE, D, BLOCK_D)
    else:
        program -= of_keys
        head = program // blocks
        start = v_ptr + (head // G).to(tl.int64) * v_batch_stride + (head % G).to(tl.int64) * v_head_stride
        _values(start, v_codes_ptr, v_scale_ptr, head, program % blocks, blocks, keys, v_row_stride, LARGEST, D, BLOCK_D)


def _launch(config: Config, k: Tensor, v: Tensor, format: str) -> Coded:
    coded = _fake(k, v, format)
    k_codes, v_codes, k_scale, v_scale = coded
    if of_keys := k_scale.numel():
        dim = k.shape[3]
        quantize_keys_values_kernel[(of_keys * (2 if format == "fp8" else 1),)](
            k, v, k_codes, v_codes, k_scale, v_scale, k.shape[1], k.shape[2], k_scale.shape[2], of_keys,
            *k.stride()[:3], *v.stride()[:3],
            LARGEST=FORMATS[format].largest, SAMPLE=SAMPLE, D=dim, BLOCK_D=next_pow2(dim), **UNFUSED, **config,
        )  # fmt: skip
    return coded


quantize_keys_values_op = Op(
    name="quantize_keys_values",
    reference=_reference,
    problem=lambda k, v, format: Problem(k.dtype, k.shape[-1], format),
    cost=_cost,
    examples=EXAMPLES,
    make=quantize_keys_values_arguments,
    fake=_fake,
    codes_may_move=True,
    impls=(Impl(name="triton", launch=_launch, space=SPACE, refuse=_refuse, batch_invariant=True),),
)
