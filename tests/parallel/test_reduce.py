"""The one order of sums, and the pieces that it is made over."""

import numpy as np
import pytest
import torch

from tilewright.parallel.pieces import Piece, merged_rows, rows_of
from tilewright.parallel.reduce import RunningSum, TreeSum, row_squares, running_sum, tree


def pairwise(terms: list[torch.Tensor]) -> torch.Tensor:
    """The definition: neighbours in pairs, then the sums in pairs, what is left over at the end."""
    if len(terms) == 1:
        return terms[0]
    half = 1 << (len(terms) - 1).bit_length() - 1
    return pairwise(terms[:half]) + pairwise(terms[half:])


@pytest.mark.parametrize("count", range(1, 18))
def test_the_tree_is_that_of_the_definition(count: int) -> None:
    terms = list(torch.randn(count, 50, generator=torch.Generator().manual_seed(count)) * 1e3)
    assert torch.equal(tree(terms), pairwise(terms))


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_runs_of_terms_form_branches_of_the_same_tree(ranks: int) -> None:
    terms = torch.randn(8, 100, generator=torch.Generator().manual_seed(0))
    runs = [tree(list(run)) for run in terms.chunk(ranks)]
    assert torch.equal(tree(runs), tree(list(terms)))
    dealt = [tree([terms[turn * ranks + rank] for rank in range(ranks)]) for turn in range(8 // ranks)]
    assert torch.equal(tree(dealt), tree(list(terms)))


def test_the_order_of_a_running_sum_is_another() -> None:
    terms = torch.randn(8, 1000, generator=torch.Generator().manual_seed(0))
    (total,) = running_sum([term.clone()] for term in terms)
    assert not torch.equal(total, tree(list(terms)))
    torch.testing.assert_close(total, tree(list(terms)))


@pytest.mark.parametrize("kind", [TreeSum, RunningSum])
def test_a_sum_of_nothing_is_refused(kind: type) -> None:
    with pytest.raises(ValueError, match="no micro-batches"):
        kind().result()


@pytest.mark.parametrize("shape", [(7,), (5, 1), (6, 33), (8, 64), (3, 4, 5)])
def test_sums_of_squares_of_rows_do_not_depend_on_the_other_rows(shape: tuple[int, ...]) -> None:
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    whole = row_squares(grad)
    torch.testing.assert_close(
        whole.double(), grad.double().square().flatten(1).sum(1) if grad.dim() > 1 else grad.double() ** 2
    )
    for row in range(shape[0]):
        assert torch.equal(row_squares(grad[row : row + 1]), whole[row : row + 1])


def test_pieces_cover_a_parameter_once() -> None:
    whole = torch.arange(24.0 * 10).view(24, 10)
    back = torch.full_like(whole, -1)
    places: list[int] = []
    for index in range(2):
        rows = merged_rows((12, 8, 4), index, 2)
        for part in range(3):
            for column in range(2):
                piece = Piece(of="w", shape=(24, 10), rows=rows, columns=(5 * column, 5 * column + 5))
                piece = piece.narrowed(*rows_of(12, part, 3))
                assert Piece.of_table(piece.table()) == piece
                cut = piece.cut(whole)
                assert cut.shape == piece.size
                piece.paste(cut, back)
                places += piece.places().tolist()
    assert torch.equal(back, whole)
    assert sorted(places) == list(range(48))


def test_merged_rows_are_a_part_of_each_projection() -> None:
    assert merged_rows((8, 4, 4), 1, 2) == ((4, 8), (10, 12), (14, 16))
    assert [rows_of(10, part, 4) for part in range(4)] == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert np.diff(rows_of(3, 3, 4)).item() == 0
