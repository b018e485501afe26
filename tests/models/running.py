"""Running a model without an engine: batches and a cache for a few sequences, made from plain lists."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilewright.models import Model
from tilewright.nn import Batch, KVCache, LatentCache


def make_cache(model: Model, pages: int, page_size: int) -> KVCache | LatentCache:
    """An empty cache of the model's dtype and device."""
    return model.empty_cache(pages, page_size)


def make_batch(
    rows: Sequence[tuple[Sequence[int], int, int]], page_size: int, device: torch.device | str = "cpu", padding: int = 0
) -> Batch:
    """A batch of rows (pages of the sequence, first position, token count), every token's logits asked for.

    padding: tokens and empty sequences to append, as a captured graph of a larger size would have.
    """
    positions = [p for _, start, count in rows for p in range(start, start + count)]
    slots = [
        pages[p // page_size] * page_size + p % page_size for pages, start, count in rows for p in range(start, start + count)
    ]
    width = max(len(pages) for pages, _, _ in rows)
    table = [[*pages, *[0] * (width - len(pages))] for pages, _, _ in rows] + [[0] * width] * padding
    counts = [count for _, _, count in rows] + [1] * padding
    return Batch(
        positions=torch.tensor(positions + [0] * padding, dtype=torch.int64, device=device),
        slots=torch.tensor(slots + [-1] * padding, dtype=torch.int64, device=device),
        block_table=torch.tensor(table, dtype=torch.int32, device=device),
        kv_lens=torch.tensor([start + count for _, start, count in rows] + [0] * padding, dtype=torch.int32, device=device),
        cu_q=torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32, device=device),
        max_q_len=max(counts),
        logits_rows=torch.arange(len(positions), device=device),
    )


def run_logits(model: Model, token_ids: Sequence[int], chunk: int, page_size: int = 4) -> Tensor:
    """Logits [T, V] of one sequence, `chunk` tokens a step, over pages in no order."""
    device = model.embed.weight.device
    count = -(-len(token_ids) // page_size)
    pages = torch.randperm(count + 2, generator=torch.Generator().manual_seed(1))[:count].tolist()
    cache = make_cache(model, count + 2, page_size)
    logits = []
    for start in range(0, len(token_ids), chunk):
        part = token_ids[start : start + chunk]
        batch = make_batch([(pages, start, len(part))], page_size, device)
        logits.append(model.logits(model(torch.tensor(part, device=device), batch, cache)))
    return torch.cat(logits)
