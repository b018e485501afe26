"""Waves of a library's product, for tiles that it may take: the classic case of 1792 and 1793 on an A100, and what is near."""

import pytest
from typer.testing import CliRunner

from tilewright.bench.library_waves import TILES, Product, alignment_cliffs, tile_waves, wave_cliffs
from tilewright.cli import app
from tilewright.hw import env

A100_SMS = 108


def square(n: int) -> Product:
    return Product(m=n, n=n, k=n)


@pytest.mark.parametrize(("n", "tiles", "waves"), [(1792, 98, 1), (1793, 120, 2)])
def test_the_classic_case(n: int, tiles: int, waves: int) -> None:
    found = tile_waves(square(n), (256, 128), A100_SMS)
    assert (found.blocks, found.waves) == (tiles, waves)


def test_one_more_than_a_wave_is_a_cliff_and_is_told_from_both_sides() -> None:
    below, above = (list(wave_cliffs(square(n), A100_SMS)) for n in (1792, 1793))
    assert "M=N=1793: 120 tiles of 256 x 128, 2 waves instead of 1 wave: 2.00 times the time for 1.00 times the work" in below
    assert "M=N=1792: 98 tiles of 256 x 128, 1 wave instead of 2 waves: 0.50 times the time for 1.00 times the work" in above


@pytest.mark.parametrize("product", [square(1793), Product(m=300, n=5000, k=64), Product(m=1, n=4096, k=8, batch=40)], ids=str)
def test_between_here_and_a_cliff_nothing_changes(product: Product) -> None:
    """Every size, one by one, against the steps that the search takes."""
    told = list(wave_cliffs(product, A100_SMS))
    for line in told:
        name, _, size = line.partition(": ")[0].rpartition("=")
        tile = next(tile for tile in TILES if f"{tile[0]} x {tile[1]}" in line)
        now = product.m if "M" in name else product.n
        between = range(int(size) + 1, now + 1) if int(size) < now else range(now, int(size))
        counts = [tile_waves(changed(product, name, n), tile, A100_SMS).waves for n in (*between, int(size))]
        here = tile_waves(product, tile, A100_SMS).waves
        assert all(abs(count - here) < max(1, 0.1 * here) for count in counts[:-1]), line
        assert abs(counts[-1] - here) >= max(1, 0.1 * here), line


def changed(product: Product, name: str, size: int) -> Product:
    sides = {"m": product.m, "n": product.n} | {side.lower(): size for side in name.replace("=", "")}
    return Product(**sides, k=product.k, batch=product.batch)


def test_alignment() -> None:
    near = list(alignment_cliffs(square(1793)))
    assert near[0].startswith("K=1792 and K=1800: rows of x and of the weight start at multiples of 16 bytes")
    assert list(alignment_cliffs(square(1792)))[1].startswith("N=1791 and N=1793: rows of the result no longer start")
    assert next(iter(alignment_cliffs(Product(m=8, n=8, k=3)))).startswith("K=8: ")


@pytest.mark.skipif(env.interpreting(), reason="the interpreter compiles nothing")
def test_explain_tells_it_and_says_that_it_is_an_estimate() -> None:
    words = ["explain", "linear", "M=1793", "N=1793", "K=1793", "--card", "a100"]
    text = CliRunner().invoke(app, words).output
    assert "with tiles of 256 x 128, one per SM: 120 tiles, 2 waves, 12 of 108 blocks in the last" in text
    assert "M=N=1792: 98 tiles of 256 x 128, 1 wave instead of 2 waves" in text
    assert "(estimate)" in text
    assert "K=1792 and K=1800" in text
    other = CliRunner().invoke(app, [*words, "--prefer", "triton"]).output
    assert "with tiles of" not in other, "what can be looked into is not estimated"
