"""Prepares a single prompt as arguments of a model, without an engine, for calibration and evaluation."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilewright.models.decoder import Decoder
from tilewright.nn import Batch, KVCache, LatentCache

__all__ = ["prompt_inputs"]

_PAGE_SIZE = 16


def prompt_inputs(model: Decoder, token_ids: Sequence[int]) -> tuple[Tensor, Batch, KVCache | LatentCache]:
    """(token ids, batch, cache) for `model(...)`: the whole prompt in one pass, with a new cache.

    `tw.quantize(model, format, calibration=...)` accepts a list of such tuples.

    Raises:
        ValueError: there are no tokens, or more than the model has positions.
    """
    count, config, device = len(token_ids), model.config, model.embed.weight.device
    if not 0 < count <= config.max_position_embeddings:
        raise ValueError(
            f"prompt_inputs: got {count} tokens, wanted 1 to {config.max_position_embeddings}, the number of positions "
            "of the model"
        )
    pages = -(-count // _PAGE_SIZE)
    cache = model.empty_cache(pages, _PAGE_SIZE)
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
