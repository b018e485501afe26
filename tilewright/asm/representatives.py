"""The problems on which the configs of an op are certified: as few as possible such that every config is covered.

A row of the table has dimensions for `Op.make`; a config is compiled on the first row that accepts it. Row counts are as small
as possible, because kernels do not depend on them.

An op that is not in the table is certified on its examples, 16-bit dtypes first, which is enough for a small op. A test reports
which values of which axis no representative covers.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["representatives"]

# Norms and softmax hold a row that is no wider than BLOCK_D in one block, so each width has configs of its own. Ascending: a
# config that a narrow row takes in one block is certified there, and on a wide row only what no narrow one takes.
_ROWS = (*({"M": 4, "N": 1 << i} for i in range(6, 15)), {"M": 2, "N": 131072})
_CHANNELS = (
    *({"M": 64, "N": 1 << i} for i in (4, 5, 6, 7, 8)),
    *({"M": 1 << i, "N": 64, "first": True} for i in (5, 7, 10)),
)
_REDUCED = (
    *({"M": 128, "N": 1 << i} for i in (4, 5, 6, 7, 8)),
    *({"M": 1 << i, "N": 256} for i in (4, 5, 6)),
    *({"M": 1 << i, "N": 64, "rows": True} for i in (4, 5, 6, 7, 8, 9, 10)),
    *({"M": 4096, "N": i, "rows": True} for i in (1, 2)),
)
_LOSSES = (*({"M": 4, "N": 1 << i} for i in (6, 9, 10, 11, 12, 13, 14)), {"M": 2, "N": 131072})
_TABLE: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "add_layer_norm": _ROWS[:-1],
    "add_rms_norm": _ROWS,
    "append_affine": (
        *({"M": 64, "N": 1 << i} for i in (4, 5, 6, 7, 8)),
        {"M": 3136, "N": 224, "width": 256, "new": 32, "activation": "relu"},
    ),
    "layer_norm": _ROWS,
    "layer_norm_stats": (*_ROWS, {"M": 2, "N": 131072, "dtype": torch.float32}),
    "layer_norm_backward": (
        *({"M": 4, "N": 32}, *_ROWS, {"M": 2, "N": 16384, "dtype": torch.float32}),
        {"M": 2, "N": 131072, "stats": True},
    ),
    "log_softmax": _ROWS,
    "log_softmax_backward": ({"M": 4, "N": 32}, *_ROWS, {"M": 2, "N": 131072, "dtype": torch.float32}),
    "reduce_max": _REDUCED,
    "reduce_sum": _REDUCED,
    "rms_norm": _ROWS,
    "rms_norm_backward": ({"M": 4, "N": 32}, *_ROWS, {"M": 2, "N": 16384, "dtype": torch.float32}),
    "softmax": _ROWS,
    "softmax_backward": ({"M": 4, "N": 32}, *_ROWS, {"M": 2, "N": 131072, "dtype": torch.float32}),
    "batch_norm_backward": _CHANNELS,
    "batch_statistics": _CHANNELS,
    "channel_affine": _CHANNELS,
    "channel_sums": _CHANNELS,
    "group_norm": (
        *({"M": 1 << i, "N": 8} for i in range(14)),
        {"M": 4096, "N": 320, "groups": 32, "added": True, "activation": "silu"},
    ),
    "normalize_channels": _CHANNELS,
    "cross_entropy": _LOSSES,
    "cross_entropy_gradient": _LOSSES,
    "cross_entropy_gradient_in_place": _LOSSES,
    "conv": (
        {"N": 2, "C": 64, "H": 14, "O": 256},
        {"N": 2, "C": 32, "H": 14, "O": 64},  # half steps of K
        {"N": 1, "C": 32, "H": 14, "O": 64, "K": 7},  # the same of tiles that are shared
        {"N": 2, "C": 64, "H": 14, "O": 64, "K": 7, "groups": 64},
        {"N": 2, "C": 64, "H": 14, "O": 64, "K": 3, "groups": 64},  # several rows of y
        {"N": 2, "C": 64, "H": 14, "O": 64, "groups": 16},
        {"N": 2, "C": 128, "H": 14, "O": 256, "dtype": torch.int8},
        {"N": 2, "C": 64, "H": 14, "O": 64, "dtype": torch.float32},
    ),
    "lora_expand_add": ({"M": 20, "N": 4096, "adapters": 3}, {"M": 20, "N": 4096, "adapters": 3, "dtype": torch.float32}),
    "lora_expand_silu_mul": ({"M": 20, "N": 4096, "adapters": 3}, {"M": 20, "N": 4096, "R": 32, "adapters": 3}),
    "lora_shrink": (
        {"M": 20, "K": 2048, "parts": 3, "adapters": 3},
        {"M": 20, "K": 2048, "parts": 3, "adapters": 3, "dtype": torch.float32},
    ),
    "layer_norm_quantize": ({"M": 4, "N": 128}, {"M": 4, "N": 512}, {"M": 4, "N": 1024, "keep": True}),
    "conv_codes": (
        {"N": 2, "C": 128, "H": 14, "O": 256},
        {"N": 2, "C": 32, "H": 14, "O": 64},
        {"N": 2, "C": 64, "H": 14, "O": 64, "groups": 16},
    ),
    "conv_transpose": (
        {"N": 32, "C": 128, "H": 28, "O": 128, "K": 3, "S": 2, "P": 1},
        {"N": 2, "C": 64, "H": 14, "O": 256},
        {"N": 2, "C": 64, "H": 14, "O": 64, "K": 3, "groups": 64},
        {"N": 2, "C": 32, "H": 14, "O": 64},
        {"N": 2, "C": 64, "H": 14, "O": 64, "dtype": torch.float32},
    ),
    "conv_weight_gradient": (
        {"N": 32, "C": 64, "H": 56, "O": 64},
        {"N": 32, "C": 64, "H": 56, "O": 64, "dtype": torch.float32},
    ),
    "gelu_mul": ({"M": 4, "N": 8192},),
    "silu_mul": ({"M": 4, "N": 8192},),
    "edit_logits": ({"M": 2, "N": 128256},),
    "decode_inputs": ({"M": 2},),
    "mask_logits": ({"M": 2, "N": 128256},),
    "kv_cache_write": ({"T": 8},),
    "permute": (
        *({"M": 2048, "N": 2048}, {"M": 2048, "N": 2048, "dtype": torch.float32}),
        *({"M": m, "N": n, "int8": int8} for m, n in ((2047, 2048), (2048, 2047), (2047, 2047)) for int8 in (False, True)),
    ),
    "rope": ({"T": 8},),
    "rope_kv_write": ({"T": 8},),
    "sample": ({"M": 2, "N": 128256},),
    "token_logprobs": ({"M": 2, "N": 128256},),
    "top_logprobs": ({"M": 2, "N": 128256},),
    "attention": (
        {"B": 2, "KV": 4096, "causal": True},
        {"B": 2, "KV": 4096, "D": 64, "causal": True},
        {"B": 2, "KV": 200, "D": 64},
    ),
    "attention_backward": (
        {"B": 2, "KV": 512, "causal": True},
        {"B": 2, "KV": 512, "D": 64, "causal": True},
        {"B": 2, "KV": 512, "causal": True, "packed": True, "deterministic": True},
    ),
    # D = 64 for the tiles that shared memory holds at no wider head; pages of 64 for boxes that are less than a page.
    "paged_attention": ({"B": 2, "KV": 256}, {"B": 2, "KV": 256, "D": 64}, {"B": 2, "KV": 256, "S": 64}),
    "scaled_linear": (
        {"M": 512, "N": 4096, "K": 8192, "dtype": torch.int8},
        {"M": 128, "N": 512, "K": 16384, "dtype": torch.int8},
        {"M": 16, "N": 4096, "K": 8192, "dtype": torch.int8},
    ),
    "quantize_rows": (*_ROWS, {"M": 2, "N": 28672}),
    "quantize_static": (*_ROWS, {"M": 2, "N": 28672}),
    "quantize_tensor": (*_ROWS, {"M": 2, "N": 28672}),
    "rms_norm_quantize": _ROWS[:-1],
    "add_rms_norm_quantize": _ROWS[:-1],
    "silu_mul_quantize": (*_ROWS[:-1], {"M": 2, "N": 28672}),
    "quantize_blocks": ({"M": 4, "N": 4096},),
    "quantize_mx": ({"M": 4, "N": 4096},),
    "quantize_fold": ({"M": 4, "N": 4096},),
    "block_scaled_linear": (
        {"M": 512, "N": 4096, "K": 4096},
        {"M": 512, "N": 4096, "K": 4096, "block_rows": 1},
        {"M": 16, "N": 4096, "K": 4096},
    ),
    "grouped_linear": (
        {"X": 2, "M": 512, "N": 512, "K": 256},
        {"X": 2, "M": 128, "N": 512, "K": 256},
        {"X": 2, "M": 32, "N": 512, "K": 256},
        {"X": 2, "M": 8, "N": 512, "K": 256},
        {"X": 2, "M": 128, "N": 512, "K": 256, "dtype": torch.float32},
        {"X": 2, "M": 8, "N": 512, "K": 256, "dtype": torch.float32},
    ),
    "grouped_block_scaled_linear": ({"X": 2, "M": 512, "N": 512, "K": 256}, {"X": 2, "M": 8, "N": 512, "K": 256}),
    "grouped_mixed_linear": (
        {"X": 2, "M": 16, "N": 512, "K": 256, "group": 128, "zeros": True},
        {"X": 2, "M": 512, "N": 512, "K": 256, "group": 128, "zeros": True},
        {"X": 2, "M": 16, "N": 512, "K": 256, "format": "int8"},
        {"X": 2, "M": 512, "N": 512, "K": 256, "format": "int8"},
        {"X": 2, "M": 128, "N": 512, "K": 256, "format": "e4m3", "group": 128, "block_rows": 128},
    ),
    "grouped_scaled_linear": (
        {"X": 2, "M": 512, "N": 512, "K": 256},
        {"X": 2, "M": 16, "N": 512, "K": 256},
        {"X": 2, "M": 512, "N": 512, "K": 256, "dtype": torch.float8_e4m3fn},
    ),
    "grouped_weight_gradient": (
        {"X": 2, "M": 512, "N": 512, "K": 512},
        {"X": 2, "M": 512, "N": 512, "K": 512, "dtype": torch.float32},
    ),
    "permute_tokens": ({"T": 8, "N": 8192},),
    "combine_tokens": ({"T": 8, "N": 8192},),
    "route_experts": ({"T": 8},),
    "mx_linear": ({"M": 512, "N": 4096, "K": 4096},),
    "mixed_linear": (
        {"M": 16, "N": 4096, "K": 4096, "group": 128, "zeros": True},
        {"M": 8, "N": 4096, "K": 4096, "group": 128, "zeros": True},  # taller tiles
        {"M": 512, "N": 4096, "K": 4096, "group": 128, "zeros": True},
        {"M": 512, "N": 4096, "K": 4096, "format": "int8"},  # what has no room for int4
        {"M": 4096, "N": 8192, "K": 8192, "group": 128, "zeros": True},  # the weight written out under the products
        {"M": 64, "N": 4096, "K": 4096, "group": 128, "zeros": True},
        {"M": 32, "N": 4096, "K": 4096, "group": 128, "zeros": True},
        {"M": 16, "N": 4096, "K": 4096, "format": "int8"},  # whole tiles, and three programs an SM
        {"M": 64, "N": 4096, "K": 4096, "format": "int8"},
    ),
    "linear": (
        {"M": 512, "N": 4096, "K": 4096},
        {"M": 512, "N": 2047, "K": 2047},  # rows that do not start at 16 bytes
        {"M": 128, "N": 512, "K": 8192},  # SPLIT_K, for which the tiles must not fill a card
        {"M": 16, "N": 512, "K": 8192},
        {"M": 8, "N": 4096, "K": 4096},
        {"M": 4, "N": 4096, "K": 4096},
        {"M": 1, "N": 4096, "K": 4096},
        {"M": 512, "N": 2048, "K": 2048, "dtype": torch.float32},
        {"M": 128, "N": 512, "K": 8192, "dtype": torch.float32},
        {"M": 16, "N": 512, "K": 4096, "dtype": torch.float32},
        {"M": 1, "N": 4096, "K": 4096, "dtype": torch.float32},
        {"M": 16, "N": 2047, "K": 2047},
        {"M": 1, "N": 2047, "K": 2047},
    ),
}


def representatives(op: Any, inputs: Any) -> list[tuple[str, tuple[Any, ...]]]:
    """(label, arguments of the op) of each representative, in the order in which they are tried.

    Args:
        op: a `tilewright.op.Op`.
        inputs: () -> a new `tilewright.op.Inputs`.
    """
    if op.make is None or op.name not in _TABLE:
        examples = [(example.label, example.make(inputs())) for example in op.examples]
        return sorted(examples, key=lambda example: _itemsize(example[1]) != 2)
    return [(_label(dims), op.make(inputs(), **dims)) for dims in _TABLE[op.name]]


def _itemsize(args: tuple[Any, ...]) -> int:
    return next((arg.dtype.itemsize for arg in args if isinstance(arg, Tensor) and arg.is_floating_point()), 0)


def _label(dims: Mapping[str, Any]) -> str:
    """The dimensions as written on a command line: "M=4 N=64 dtype=float32"."""
    return " ".join(f"{name}={str(value).removeprefix('torch.')}" for name, value in dims.items())
