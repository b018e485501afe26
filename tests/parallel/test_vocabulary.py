"""The embedding and the loss over slices of the vocabulary, against the whole in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.parallel.ranks import ALONE
from tilewright.parallel.vocabulary import SlicedEmbedding, SlicedHead, plain_vocabulary

ROWS, FEATURES, CLASSES = 37, 24, 48


def operands() -> tuple[Tensor, Tensor, Tensor]:
    """x, the weight of the head, and targets, of which some do not count."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, FEATURES, generator=generator) for rows in (ROWS, CLASSES))
    targets = torch.randint(CLASSES, (ROWS,), generator=generator)
    targets[::5] = -100
    return 3 * x, weight, targets


def oracle(x: Tensor, weight: Tensor, targets: Tensor, smoothing: float, z_loss: float) -> list[Tensor]:
    """The loss and its gradients by x and weight, float64."""
    x, weight = (t.double().requires_grad_(True) for t in (x, weight))
    logits = x @ weight.mT
    loss = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)
    loss = loss + z_loss * (logits.logsumexp(1).square() * (targets != -100)).sum()
    return [loss.detach(), *torch.autograd.grad(loss, (x, weight))]


@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.0, 0.01), (0.1, 0.0), (0.2, 0.01)])
@pytest.mark.parametrize("slices", [1, 2, 4])
def test_the_loss_and_its_gradients_are_those_of_all_logits(slices: int, smoothing: float, z_loss: float) -> None:
    x, weight, targets = operands()
    head = SlicedHead(weight.chunk(slices), 0, ALONE)
    x.requires_grad_(True)
    loss = head.loss(x, targets, label_smoothing=smoothing, z_loss=z_loss)
    dx, *parts = torch.autograd.grad(loss / 7, [x, *head.parameters()])
    wanted = oracle(x.detach(), weight, targets, smoothing, z_loss)
    found = [loss.detach(), 7 * dx, 7 * torch.cat(parts)]
    assert all(torch.allclose(a.double(), b, rtol=1e-5, atol=1e-5) for a, b in zip(found, wanted))
    with torch.no_grad():
        assert torch.equal(head.loss(x, targets, label_smoothing=smoothing, z_loss=z_loss), loss)


def test_logits_far_apart_stay_finite() -> None:
    x, weight, targets = operands()
    head = SlicedHead(weight.chunk(2), 0, ALONE)
    found = head.loss(40 * x, targets)
    assert torch.allclose(found.double(), oracle(40 * x, weight, targets, 0.0, 0.0)[0], rtol=1e-5)


def test_a_target_that_is_no_class_is_refused() -> None:
    x, weight, targets = operands()
    targets[1] = CLASSES
    with pytest.raises(ValueError, match="SlicedHead: the target of row 1 is 48"):
        SlicedHead(weight.chunk(2), 0, ALONE).loss(x, targets)


def test_an_embedding_in_slices_is_the_table() -> None:
    _, weight, ids = operands()
    ids = ids.abs() % CLASSES
    table, dy = weight.double().requires_grad_(True), torch.randn(ROWS, FEATURES)
    sliced = SlicedEmbedding(weight.chunk(4), 0, ALONE, True)
    out = sliced(ids)
    assert torch.equal(out, weight[ids])
    found = torch.cat(torch.autograd.grad(out, list(sliced.parameters()), dy))
    (wanted,) = torch.autograd.grad(F.embedding(ids, table), table, dy.double())
    assert torch.allclose(found.double(), wanted, rtol=1e-6, atol=1e-6)


def test_what_has_more_to_it_than_a_table_stays_whole() -> None:
    class Model:
        embed = torch.nn.Embedding(4, 4)
        head = torch.nn.Linear(4, 4)

    assert not plain_vocabulary(Model())
