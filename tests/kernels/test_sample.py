"""What conformance cannot say of sampling: the generator's published vectors, the distribution, and the odd rows."""

import re

import pytest
import torch
from torch import Tensor

from tilewright.hw.device import device_of
from tilewright.kernels.device.philox import LANES, gumbel_reference, philox4x32_reference
from tilewright.kernels.sampling.sample import sample, sample_op

INF, NAN = float("inf"), float("nan")
GPU = torch.cuda.is_available()
needs_triton = pytest.mark.skipif(
    not device_of(0 if GPU else -1).runs_triton, reason="no GPU here: run with TRITON_INTERPRET=1"
)


def settings(
    rows: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: Tensor | int = 0,
    position: Tensor | int = 0,
) -> tuple[Tensor, ...]:
    """The arguments of `sample` after the logits, one value for all rows."""
    return (
        torch.full((rows,), temperature),
        torch.full((rows,), top_k, dtype=torch.int32),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
        torch.zeros(rows, dtype=torch.int64) + seed,
        torch.zeros(rows, dtype=torch.int64) + position,
    )


def reference(logits: Tensor, *args: Tensor) -> Tensor:
    """The definition, on any device and under the interpreter."""
    return sample_op.reference(logits, *args)


def here(logits: Tensor, *args: Tensor) -> Tensor:
    """The public function: the kernel on a GPU or under the interpreter, else the reference."""
    return sample(*(a.to("cuda" if GPU else "cpu") for a in (logits, *args))).cpu()


def test_philox_known_answers() -> None:
    """The vectors that Random123 publishes for philox4x32, 10 rounds (kat_vectors)."""
    ones = 0xFFFFFFFF
    table = [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ones,) * 4, (ones,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ]
    for counter, key, want in table:
        got = philox4x32_reference(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
        assert tuple(map(int, got)) == want


def test_noise_of_a_token_is_its_word_of_philox() -> None:
    """The map from tokens to words that device/philox.py states, and the noise's independence of the vocabulary's size."""
    seed, position = torch.tensor([-5, 7]), torch.tensor([2**33 + 1, 0])
    noise = gumbel_reference(seed, position, 9000, torch.float64)
    for row, token in [(0, 0), (0, 1023), (0, 1024), (1, 4095), (1, 4096), (0, 8999)]:
        low = 0xFFFFFFFF
        place = token // (4 * LANES) * LANES + token % LANES
        at, key = int(position[row]), int(seed[row])
        counter = tuple(map(torch.tensor, (place, 0, at & low, at >> 32 & low)))
        words = philox4x32_reference(counter, (torch.tensor(key & low), torch.tensor(key >> 32 & low)))
        v = (int(words[token // LANES % 4]) + 0.5) / 2**32
        want = -torch.log(-torch.log1p(torch.tensor(-v, dtype=torch.float64)))
        torch.testing.assert_close(noise[row, token], want, rtol=1e-6, atol=1e-6)
    for vocab in (1, 5, 1024, 1025, 4096, 4097):
        assert torch.equal(gumbel_reference(seed, position, vocab, torch.float64), noise[:, :vocab])


def test_noise_is_gumbel() -> None:
    """A million draws: mean, variance, and the tail that decides who wins, against the distribution's own figures."""
    noise = gumbel_reference(torch.arange(250), torch.arange(250), 4096).double()
    assert abs(float(noise.mean()) - 0.5772157) < 0.005
    assert abs(float(noise.var()) - 1.6449341) < 0.01
    for level in (-1.0, 0.0, 2.0, 5.0, 9.0):
        p = 1 - torch.exp(-torch.exp(torch.tensor(-level, dtype=torch.float64)))
        got = int((noise > level).sum())
        want, sigma = float(noise.numel() * p), float((noise.numel() * p * (1 - p)).sqrt())
        assert abs(got - want) < 4.5 * sigma, level


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"temperature": 0.5}, [0, 1, 2, 3, 4, 5]),
        ({"top_k": 2}, [1, 3, 4]),
        ({"top_k": 1}, [1]),
        ({"top_p": 0.5}, [1, 3, 4]),
        ({"top_p": 0.3}, [1]),
        ({"top_p": 0.0}, [1]),
        ({"min_p": 0.3}, [0, 1, 3, 4]),
        ({"min_p": 1.0}, [1]),
        ({"top_k": 3, "top_p": 0.75}, [1, 3, 4]),
        ({"top_k": 4, "top_p": 0.9, "min_p": 0.3}, [0, 1, 3, 4]),
        ({"temperature": 0.25, "top_p": 0.9}, [1, 3, 4]),
    ],
    ids=str,
)
def test_draws_from_the_kept_tokens(options: dict, kept: list[int]) -> None:
    """Chi-square of 20000 draws against the softmax over the tokens that must be kept, worked out by hand."""
    probabilities = torch.tensor([0.12, 0.32, 0.08, 0.2, 0.2, 0.08])
    rows = 20000
    logits = probabilities.log().expand(rows, -1)
    ids = reference(logits, *settings(rows, **options, seed=torch.arange(rows), position=11))
    want = torch.zeros(6)
    want[kept] = (probabilities[kept].log() / options.get("temperature", 1.0)).softmax(0)
    counts = torch.bincount(ids, minlength=6).float()
    assert not counts[want == 0].any()
    expected = rows * want[want > 0]
    # 99.99 % of chi-square with 5 degrees of freedom lies below 25.7; with fewer degrees lower still.
    assert float(((counts[want > 0] - expected) ** 2 / expected).sum()) < 25.7


ODD_ROWS = {
    "greedy, ties": ([1.0, 3.0, 3.0, 2.0], {"temperature": 0.0}, 1),
    "greedy, zeros of both signs": ([-1.0, -0.0, 0.0, 0.0], {"temperature": 0.0}, 1),
    "greedy, NaN": ([NAN, 1.0, NAN, 2.0], {"temperature": 0.0}, 3),
    "greedy, only NaN": ([NAN, NAN], {"temperature": 0.0}, 0),
    "only -inf": ([-INF, -INF, -INF], {}, 0),
    "only -inf, filtered": ([-INF, -INF, -INF], {"top_k": 2, "top_p": 0.5}, 0),
    "one left": ([-INF, -INF, -2.0, -INF], {}, 2),
    "one left, filtered": ([-INF, NAN, -2.0, -INF], {"top_k": 3, "top_p": 0.9, "min_p": 0.1}, 2),
    "inf": ([0.0, INF, 5.0], {"temperature": 0.7}, 1),
    "inf, filtered": ([0.0, INF, 5.0], {"temperature": 0.7, "top_p": 0.9}, 1),
    "temperature NaN is greedy": ([0.0, 0.1, 0.0], {"temperature": NAN}, 1),
    "nearly greedy": ([0.0, 0.1, 0.0], {"temperature": 1e-4}, 1),
    "top 1": ([0.0, 0.1, 0.05], {"top_k": 1}, 1),
    "top-p of nothing": ([0.0, 0.1, 0.05], {"top_p": 0.0}, 1),
    "top-k of more than there are": ([-INF, 0.0, -INF], {"top_k": 2}, 1),
}


@pytest.mark.parametrize("row", ODD_ROWS.values(), ids=ODD_ROWS.keys())
def test_odd_rows(row: tuple[list[float], dict, int]) -> None:
    values, options, want = row
    assert here(torch.tensor([values]), *settings(1, **options)).tolist() == [want]


@needs_triton
@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 2, "top_p": 0.99},
        {"top_k": 150, "top_p": 0.5},
        {"top_k": 3},
        {"top_p": 0.4},
        {"min_p": 0.9},
        {"top_k": 999, "min_p": 0.2},
    ],
    ids=str,
)
def test_kernel_keeps_ties(options: dict) -> None:
    """Logits of six values only, so that every threshold falls into a large tie; two tiles of logits."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randint(0, 6, (1, 4200), generator=generator).to(torch.bfloat16) / 2
    args = settings(1, 0.8, **options, seed=2**40 + 3, position=2**35)
    assert torch.equal(here(logits, *args), reference(logits, *args))


def test_a_row_does_not_depend_on_its_batch() -> None:
    logits = torch.randn(6, 50)
    args = settings(6, 0.9, 20, 0.9, 0.01, seed=torch.tensor([1, 2, 3, 1, 2, 3]), position=torch.tensor([0, 0, 0, 0, 1, 2]))
    together = reference(logits, *args)
    alone = [reference(logits[i : i + 1], *(a[i : i + 1] for a in args)) for i in range(6)]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ((0, torch.zeros(3)), "logits must be floats [B, V]"),
        ((0, torch.zeros(2, 0)), "V > 0"),
        ((0, torch.zeros(2, 3, dtype=torch.int64)), "got (2, 3) torch.int64"),
        ((1, torch.ones(3)), "temperature must be contiguous [2] torch.float32"),
        ((2, torch.ones(2)), "top_k must be contiguous [2] torch.int32"),
        ((5, torch.zeros(2, dtype=torch.int32)), "seed must be contiguous [2] torch.int64"),
        ((6, torch.zeros(4, dtype=torch.int64)[::2]), "position must be contiguous"),
    ],
)
def test_refused_arguments(change: tuple[int, Tensor], message: str) -> None:
    args = [torch.zeros(2, 3), *settings(2)]
    args[change[0]] = change[1]
    with pytest.raises(ValueError, match=re.escape(message)):
        sample(*args)
