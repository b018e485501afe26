"""Which operands belong to the columns of a product, against the definition: a number meets elements of one column only."""

import random

import torch
from torch import Tensor

from tilewright.fuse.columns import Columns
from tilewright.fuse.views import View, dense


def _splits(numel: int, draw: random.Random) -> list[int]:
    """Sizes whose product it is, ones among them."""
    sizes = []
    while numel > 1:
        size = draw.choice([d for d in range(2, numel + 1) if numel % d == 0])
        sizes.append(size)
        numel //= size
    sizes += [1] * draw.randint(0, 2)
    draw.shuffle(sizes)
    return sizes or [1]


def _seen(view: View, value: Tensor, draw: random.Random) -> tuple[View, Tensor]:
    """A few reshapes and permutations of both."""
    for _ in range(draw.randint(0, 4)):
        if draw.random() < 0.5:
            order = draw.sample(range(value.dim()), value.dim())
            view, value = view.permute(order), value.permute(order)
        else:
            sizes = _splits(value.numel(), draw)
            after = view.reshape(sizes)
            if after is not None:
                view, value = after, value.reshape(sizes)
    return view, value


def _wanted(column: Tensor, operand: Tensor, count: int) -> Tensor | None:
    """The operand's number for each column; None where a column meets several."""
    spread = operand.expand(column.shape)
    found = [spread[column == c].unique() for c in range(count)]
    return torch.cat(found) if all(len(one) == 1 for one in found) else None


def test_spread_is_that_of_the_definition() -> None:
    taken = 0
    for seed in range(400):
        draw = random.Random(seed)
        shape = [draw.randint(1, 4) for _ in range(draw.randint(1, 4))]
        at = draw.randrange(len(shape))
        step = torch.Size(shape[at + 1 :]).numel()
        column = (torch.arange(torch.Size(shape).numel()) // step % shape[at]).view(shape)
        view, column = _seen(dense(shape), column, draw)
        sizes = [size if draw.random() < 0.4 else 1 for size in view.shape]
        sizes = sizes[draw.randint(0, len(sizes)) :]
        operand = torch.randperm(torch.Size(sizes).numel()).view(sizes)
        spread = Columns(view, shape[at], step).spread(sizes)
        wanted = _wanted(column, operand, shape[at])
        assert (spread is None) == (wanted is None), f"seed {seed}: {shape} column {at}, {view}, operand {sizes}"
        if spread is not None and wanted is not None:
            assert torch.equal(spread.vector(operand), wanted), f"seed {seed}"
            assert spread.in_order(sizes) == (operand.numel() == shape[at] and torch.equal(operand.flatten(), wanted)), (
                f"seed {seed}"
            )
            taken += len(wanted) > 1 and operand.numel() > 1
    assert taken > 30, "the cases were to be of both kinds"
