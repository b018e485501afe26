"""layer_norm, softmax, gated activations and token_logprobs: against torch's own, at the edges, and what they refuse."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.conformance import errors
from tilewright.hw.device import device_of
from tilewright.kernels.elementwise.glu import gelu_mul, silu_mul
from tilewright.kernels.launch.shapes import row_unit, rows_of, rows_ready, token_stride, tokens_ready
from tilewright.kernels.norm.layer_norm import layer_norm
from tilewright.kernels.sampling.token_logprobs import token_logprobs, top_logprobs
from tilewright.kernels.softmax.softmax import softmax

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF, NAN = float("inf"), float("nan")


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).to(dtype).to(DEVICE)


W, B = randn(48), randn(48) + 1
IDS = torch.arange(6, device=DEVICE)
PEERS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "layer_norm": (lambda x: layer_norm(x, W, B), lambda x: functional.layer_norm(x, (48,), W, B)),
    "layer_norm, no bias, eps": (
        lambda x: layer_norm(x, W, eps=0.5),
        lambda x: functional.layer_norm(x, (48,), W, eps=0.5),
    ),
    "softmax": (softmax, lambda x: torch.softmax(x, -1)),
    "silu_mul": (lambda x: silu_mul(x, x + 1), lambda x: functional.silu(x) * (x + 1)),
    "gelu_mul": (lambda x: gelu_mul(x, x + 1), lambda x: functional.gelu(x) * (x + 1)),
    "gelu_mul, tanh": (lambda x: gelu_mul(x, x + 1, True), lambda x: functional.gelu(x, approximate="tanh") * (x + 1)),
    "token_logprobs": (
        lambda x: token_logprobs(x, IDS)[0],
        lambda x: torch.log_softmax(x, -1).gather(1, IDS[:, None])[:, 0],
    ),
}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "strided rows": lambda x: torch.cat((x, x), 1)[:, :48],
    "transposed": lambda x: x.t().contiguous().t(),
    "every other column": lambda x: x.repeat_interleave(2, 1)[:, ::2],
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("pair", PEERS.values(), ids=PEERS.keys())
def test_equals_torch(pair: tuple[Callable[..., Any], Callable[..., Any]], layout: Callable[[Tensor], Tensor]) -> None:
    ours, theirs = pair
    x = layout(randn(6, 48))
    got = ours(x)
    assert got.is_contiguous()
    torch.testing.assert_close(got, theirs(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(48,), (2, 3, 48), (0, 48), (2, 0, 48)], ids=str)
@pytest.mark.parametrize("name", ["layer_norm", "softmax", "silu_mul"])
def test_any_leading_dims(name: str, shape: tuple[int, ...]) -> None:
    ours, theirs = PEERS[name]
    x = randn(*shape)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cols", [1000, 20000])
def test_layer_norm_of_numbers_far_from_zero(cols: int) -> None:
    """A mean 3000 times the deviation: E[x^2] - E[x]^2 in float32 would be noise."""
    x = randn(2, cols) + 3000
    w, b = torch.ones(cols, device=DEVICE), torch.zeros(cols, device=DEVICE)
    want = functional.layer_norm(x.double(), (cols,))
    worst, _ = errors(layer_norm(x, w, b).cpu(), want.cpu())
    # Half an ulp of 3000 is 1.2e-4; the mean may be off by as much.
    assert worst < 3e-4


@pytest.mark.parametrize("cols", [5, 17000])
@pytest.mark.parametrize("head", [[-INF, 0.0, -INF], [NAN, 0.0], [INF, 1.0], [3e38, -3e38], [-1e30, -1e30], []], ids=str)
def test_special_rows_are_as_in_torch(head: list[float], cols: int) -> None:
    """Softmax and log-probabilities of rows with infinities, NaN and extremes; narrow rows and rows that are read twice."""
    x = torch.full((1, cols), -INF)
    x[0, : len(head)] = torch.tensor(head)
    torch.testing.assert_close(softmax(x.to(DEVICE)).cpu(), torch.softmax(x, -1), equal_nan=True)
    logprob, rank = token_logprobs(x.to(DEVICE), torch.ones(1, dtype=torch.int64, device=DEVICE))
    torch.testing.assert_close(logprob.cpu(), torch.log_softmax(x, -1)[:, 1], equal_nan=True)
    assert rank.tolist() == [1 + int((x[0] > x[0, 1]).sum())]


def test_ties_share_the_best_rank() -> None:
    x = torch.tensor([[1.0, 3.0, 3.0, 2.0]], device=DEVICE).expand(4, 4)
    assert token_logprobs(x, torch.arange(4, device=DEVICE))[1].tolist() == [4, 1, 1, 3]


@pytest.mark.parametrize("seed", range(6))
def test_the_likeliest_tokens_are_those_of_a_stable_sort(seed: int) -> None:
    """Coarse logits, so that most of them tie; -inf, both zeros; rows that want nothing, or more than there is."""
    rng = torch.Generator().manual_seed(seed)
    rows, vocab = 5, (1, 7, 65, 300, 4097, 9000)[seed]
    x = (torch.randn(rows, vocab, generator=rng) * (2.0, 0.3)[seed % 2]).round() * -0.5
    x = x.masked_fill(torch.rand(rows, vocab, generator=rng) < 0.3, -INF)
    x[:, 0] = 1.5
    ids, wanted = torch.zeros(rows, dtype=torch.int64), torch.tensor([-1, 0, 1, 9, 32], dtype=torch.int32)
    logprob, rank, top_ids, top = (t.cpu() for t in top_logprobs(x.to(DEVICE), ids.to(DEVICE), wanted.to(DEVICE), 32))
    ordered, order = x.double().sort(stable=True, dim=1, descending=True)
    lse = torch.logsumexp(x.double(), 1)
    for i, asked in enumerate(wanted.tolist()):
        n = max(0, min(asked, vocab))
        assert top_ids[i].tolist() == order[i, :n].tolist() + [-1] * (32 - n)
        torch.testing.assert_close(top[i, :n].double(), ordered[i, :n] - lse[i], atol=1e-5, rtol=1e-5)
        assert bool((top[i, n:] == -INF).all())
        assert rank[i] == (0 if asked < 0 else 1 + int((x[i] > 1.5).sum()))
        assert asked < 0 or abs(float(logprob[i]) - float(1.5 - lse[i])) < 1e-5


def test_one_kernel_gives_both_log_probabilities() -> None:
    """Bit for bit: what a server reports is what scoring the same token gives."""
    x, ids = randn(8, 5003, dtype=torch.bfloat16) * 4, torch.arange(8, device=DEVICE)
    alone = token_logprobs(x, ids)
    beside = top_logprobs(x, ids, torch.full((8,), 3, dtype=torch.int32, device=DEVICE), 5)
    assert torch.equal(alone[0], beside[0])
    assert torch.equal(alone[1], beside[1])


@pytest.mark.parametrize("value", [NAN, INF])
def test_logits_that_are_not_numbers_make_no_token_up(value: float) -> None:
    x = randn(2, 300)
    x[0, 70] = value
    found = top_logprobs(x, torch.tensor([3, 3], device=DEVICE), torch.tensor([20, 20], dtype=torch.int32, device=DEVICE), 20)
    assert bool(found[0][0].isnan())
    assert bool(found[3][0].isnan().all())
    assert 0 <= int(found[2].min()) <= int(found[2].max()) < 300
    assert bool(found[3][1].isfinite().all())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: layer_norm(randn(2, 8), randn(7)), "weight must be [8]"),
        (lambda: layer_norm(randn(2, 8), randn(8), randn(1)), "bias must be [8]"),
        (lambda: softmax(torch.tensor(1.0)), "must hold floats and have a last dimension"),
        (lambda: softmax(torch.ones(3, dtype=torch.int32)), "got (3,) torch.int32"),
        (lambda: silu_mul(randn(2, 8), randn(2, 7)), "silu_mul: gate and up must have one shape and dtype"),
        (lambda: gelu_mul(randn(2, 8), randn(2, 8).half()), "torch.float16"),
        (lambda: token_logprobs(randn(8), IDS), "logits must be floats [B, V]"),
        (lambda: token_logprobs(randn(2, 8), IDS), "ids must be contiguous [2]"),
        (lambda: token_logprobs(randn(6, 8), IDS.int()), "got (6,) torch.int32"),
        (lambda: top_logprobs(randn(6, 8), IDS, IDS, 5), "wanted must be contiguous [6] torch.int32"),
        (lambda: top_logprobs(randn(6, 8), IDS, IDS.int(), 33), "most is 33, wanted 1 to 32"),
    ],
)
def test_refused_arguments(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


@pytest.mark.parametrize("width", [49, 50, 52, 56, 64])
@pytest.mark.parametrize("name", PEERS)
def test_rows_at_any_stride(name: str, width: int) -> None:
    """Kernels count on rows that start at multiples of what divides a row: others are copied first."""
    ours, peers = PEERS[name]
    x = randn(6, width)[:, :48]
    assert errors(ours(x), peers(x.contiguous()))[0] < 1e-5
    if device_of(x.get_device()).runs_triton:  # torch's own loops over a CPU's memory differ in the last bit
        assert torch.equal(ours(x), ours(x.contiguous()))


def test_rows_that_were_not_made_ready_are_refused() -> None:
    x = torch.empty(4, 50)[:, :48]
    assert row_unit(48) == 8
    assert rows_ready(x).is_contiguous()
    with pytest.raises(
        ValueError, match="rows of 48 columns start 50 elements apart, but this must be a multiple of 8; make the tensor"
    ):
        rows_of(x)
    assert rows_of(x[:1]) == (1, 48), "of one row no stride is used"
    assert rows_of(torch.empty(1, 56)[:, :48]) == (1, 56), "but where it is one of those that are compiled for, it is told"
    assert rows_of(torch.empty(4, 51)[:, :49]) == (4, 51), "rows of an odd width start anywhere"
    assert rows_ready(torch.empty(2, 3, 50)[..., :49]).stride() == (150, 50, 1)
    heads = torch.empty(4, 2, 24)
    assert tokens_ready(heads) is heads
    narrow = torch.empty(4, 50)[:, :48].unflatten(1, (2, 24))
    assert tokens_ready(narrow).is_contiguous()
    assert token_stride(narrow[:1]) == 48
    with pytest.raises(ValueError, match="rows of 24 columns start 50 elements apart"):
        token_stride(narrow)
