"""One prompt as arguments of a model, without an engine: for calibration and evaluation."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilewright.models.decoder import Decoder
from tilewright.nn import Batch, KVCache

__all__ = ["prompt_inputs"]

_PAGE_SIZE = 16


def prompt_inputs(model: Decoder, token_ids: Sequence[int]) -> tuple[Tensor, Batch, KVCache]:
    """(token ids, batch, cache) for `model(...)`: the whole prompt in one pass, over a cache of its own.

    A list of such tuples is what `tw.quantize(model, format, calibration=...)` takes.

    Raises:
        ValueError: there are no tokens, or more than the model has positions for.
    """
    count, config, weight = len(token_ids), model.config, model.embed.weight
    if not 0 < count <= config.max_position_embeddings:
        raise ValueError(f"prompt_inputs: {count} tokens, wanted 1 to {config.max_position_embeddings}, the model's positions")
    device, pages = weight.device, -(-count // _PAGE_SIZE)
    cache = KVCache.zeros(
        layers=config.num_hidden_layers,
        pages=pages,
        kv_heads=config.num_key_value_heads,
        page_size=_PAGE_SIZE,
        head_dim=config.head_dim,
        dtype=weight.dtype,
        device=device,
    )
    positions = torch.arange(count, device=device)
    batch = Batch(
        positions=positions,
        slots=positions,
        block_table=torch.arange(pages, dtype=torch.int32, device=device)[None],
        kv_lens=torch.tensor([count], dtype=torch.int32, device=device),
        cu_q=torch.tensor([0, count], dtype=torch.int32, device=device),
        max_q_len=count,
        logits_rows=positions,
    )
    return torch.tensor(list(token_ids), dtype=torch.int64, device=device), batch, cache
