"""A rank of a test: its part of a batch's losses, and the sum over all ranks. `python -m tests.rl.loss_rank FILE`."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from tests.rl.test_losses import CASES, random_batch
from tilewright.rl.batch import Batch, select

VOCAB = 16


def policy() -> Tensor:
    """[V, V] float64: logits of the next token behind each token."""
    return torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(5), dtype=torch.float64).requires_grad_()


def logprobs_of(table: Tensor, batch: Batch) -> Tensor:
    """[T]: of each token behind the one before it, whatever sequence that is of."""
    before = torch.cat([batch.tokens.new_zeros(1), batch.tokens[:-1]])
    starts = batch.lengths.cumsum(0) - batch.lengths
    before = before.index_fill(0, starts[batch.lengths > 0], 0)
    return table.log_softmax(1)[before, batch.tokens]


def loss_and_gradient(name: str, batch: Batch) -> list[Tensor]:
    """Of the table, by this batch."""
    table = policy()
    loss = CASES[name].ours(logprobs_of(table, batch), batch)
    return [loss.detach().view(1), *torch.autograd.grad(loss, table)]


def main(path: Path) -> None:
    """Every loss; the first rank writes the sums."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    batch = random_batch(7, torch.float64)[0]
    own = select(batch, torch.arange(len(batch.lengths))[rank::ranks])
    found: dict[str, Tensor] = {}
    for name in CASES:
        for kind, tensor in zip(("loss", "gradient"), loss_and_gradient(name, own)):
            dist.all_reduce(tensor)
            found[f"{name} {kind}"] = tensor
    if rank == 0:
        save_file(found, path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
