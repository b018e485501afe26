"""Optimizers against torch.optim and float64 formulas; the clip, the NaN guard, saved state, parts of a model."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from tilewright.kernels.optimizer.adamw_8bit import GROUP, Coded, decode, encode
from tilewright.train.optim import SGD, AdamW, AdamW8bit, Momentum, Muon, Optimizer
from tilewright.train.optim.muon import orthogonalized

SHAPES = {"a": (64, 32), "b": (100,), "c": (3, 5, 7), "one": (1,), "long": (4097,)}
LR = 1e-2
Named = dict[str, Tensor]


def everything(name: str, p: Tensor) -> float:
    return 0.1


# ours, torch's with the same numbers
PAIRS: dict[str, tuple[Callable[[Named], Optimizer], Callable[[list[Tensor]], torch.optim.Optimizer]]] = {
    "sgd": (lambda p: SGD(p, decay=everything), lambda p: torch.optim.SGD(p, lr=LR, weight_decay=0.1)),
    "momentum": (
        lambda p: Momentum(p, nesterov=False, decay=everything),
        lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9, weight_decay=0.1),
    ),
    "nesterov": (
        lambda p: Momentum(p, nesterov=True, decay=everything),
        lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9, weight_decay=0.1, nesterov=True),
    ),
    "adamw": (
        lambda p: AdamW(p, betas=(0.9, 0.999), decay=everything),
        lambda p: torch.optim.AdamW(p, lr=LR, betas=(0.9, 0.999), weight_decay=0.1),
    ),
}


def weights(dtype: torch.dtype = torch.float32, seed: int = 0) -> Named:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def gradients(steps: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Iterator[Named]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield {name: (torch.randn(shape, generator=generator) + 0.3).to(dtype) for name, shape in SHAPES.items()}


def torch_steps(make: Callable[[list[Tensor]], torch.optim.Optimizer], dtype: torch.dtype, given: list[Named]) -> Named:
    params = {name: p.to(dtype).requires_grad_() for name, p in weights().items()}
    theirs = make(list(params.values()))
    for grads in given:
        for name, p in params.items():
            p.grad = grads[name].to(dtype)
        theirs.step()
    return {name: p.detach() for name, p in params.items()}


def farthest(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> float:
    """Largest error over all elements, in ulps (2^-24 to 2^-23) of the tensor's largest element."""
    return max(float((got[n].double() - want[n]).abs().max() / want[n].abs().max()) * 2**23 for n in want)


def off(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> float:
    """RMS error over all tensors."""
    return math.sqrt(sum(float((got[n].double() - want[n]).square().sum()) for n in want))


@pytest.mark.parametrize("name", PAIRS)
def test_a_hundred_steps_end_where_torch_in_float64_does(name: str) -> None:
    """Each addition to a float32 weight rounds by up to half an ulp, a hundred of them by about 3 in a random walk; torch's own
    float32 optimizers are as far off, AdamW farther: its averages are multiplied with a rounded beta."""
    ours, theirs = PAIRS[name]
    given = list(gradients(100))
    params = weights()
    optimizer = ours(params)
    for grads in given:
        optimizer.step(grads, LR)
    want = torch_steps(theirs, torch.float64, given)
    assert off(params, want) <= 1.02 * off(torch_steps(theirs, torch.float32, given), want)
    assert farthest(params, want) < 8


def ulps(got: Tensor, want: Tensor, scale: Tensor) -> float:
    """Largest distance in units of float32's last place at `scale`."""
    place = torch.nextafter(scale.float().abs(), torch.tensor(math.inf)) - scale.float().abs()
    return float(((got.double() - want).abs() / place.double()).max())


def test_every_step_of_adamw_is_within_ulps_of_float64() -> None:
    """From the state that it has, at each of 100 steps; in ulps of the weight, or of the learning rate
    where that is larger. Ten roundings make an update, three a moment."""
    params = weights()
    optimizer = AdamW(params, betas=(0.9, 0.999), decay=everything)
    for t, grads in enumerate(gradients(100), start=1):
        before = {key: value.double() for key, value in optimizer.state_dict().items()}
        optimizer.step(grads, LR)
        for name, p in params.items():
            old, g = before[f"master.{name}"], grads[name].double()
            m = 0.9 * before[f"exp_avg.{name}"] + 0.1 * g
            v = 0.999 * before[f"exp_avg_sq.{name}"] + 0.001 * g * g
            move = LR * (m / (1 - 0.9**t) / ((v / (1 - 0.999**t)).sqrt() + 1e-8) + 0.1 * old)
            assert ulps(p, old - move, old.abs().clamp_min(LR)) <= 3
            assert ulps(optimizer.state_dict()[f"exp_avg_sq.{name}"], v, v) <= 3


@pytest.mark.parametrize("name", PAIRS)
def test_the_formulas_are_torchs_in_float64(name: str) -> None:
    """The definitions that kernels are held to, run in float64 themselves."""
    ours, theirs = PAIRS[name]
    given = list(gradients(100))
    params = weights()
    optimizer = ours(params)
    for attribute, value in vars(optimizer).items():  # an optimizer of float64, which no kernel has
        if isinstance(value, Tensor) and value.dtype == torch.float32 and attribute != "_squares":
            setattr(optimizer, attribute, value.double())
    optimizer.rates[:, 1] = 0.1
    for grads in given:
        optimizer.step({n: g.double() for n, g in grads.items()}, LR)
    got = dict(zip(SHAPES, optimizer._views(optimizer.master)))
    assert farthest(got, torch_steps(theirs, torch.float64, given)) * 2**29 <= 60  # ulps of float64, of the largest element


@pytest.mark.parametrize("max_norm", [0.5, 1e4])
def test_clips_as_torch_does(max_norm: float) -> None:
    params = weights()
    optimizer = AdamW(params, betas=(0.9, 0.999), decay=everything, max_norm=max_norm)
    theirs = {name: p.double().requires_grad_() for name, p in weights().items()}
    adamw = torch.optim.AdamW(theirs.values(), lr=LR, betas=(0.9, 0.999), weight_decay=0.1)
    for grads in gradients(20):
        found = optimizer.step(grads, LR)
        for name, p in theirs.items():
            p.grad = grads[name].double()
        norm = torch.nn.utils.clip_grad_norm_(theirs.values(), max_norm)
        adamw.step()
        assert abs(float(found.norm) / float(norm) - 1) < 1e-6
    assert farthest(params, {n: p.detach() for n, p in theirs.items()}) < 10


@pytest.mark.parametrize("make", [SGD, Momentum, AdamW, AdamW8bit, Muon])
@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
def test_a_gradient_that_is_not_finite_changes_nothing(make: Any, bad: float) -> None:
    """Nor does it later: what follows is as if the step had not been."""
    runs = []
    for disturbed in (False, True):
        params = weights(torch.bfloat16)
        optimizer = make(params)
        for step, grads in enumerate(gradients(4)):
            if disturbed and step == 2:
                broken = {name: g.clone() for name, g in grads.items()}
                broken["c"][1, 2, 3] = bad
                state = {name: t.clone() for name, t in optimizer.state_dict().items() if "control" not in name}
                found = optimizer.step(broken, LR)
                assert float(found.applied) == 0
                assert all(torch.equal(t, optimizer.state_dict()[name]) for name, t in state.items())
            assert float(optimizer.step(grads, LR).applied) == 1
        runs.append((params, optimizer.state_dict()))
    for name in SHAPES:
        assert torch.equal(runs[0][0][name], runs[1][0][name])
    assert all(torch.equal(t, runs[1][1][name]) for name, t in runs[0][1].items())


@pytest.mark.parametrize("make", [SGD, Momentum, AdamW, AdamW8bit, Muon])
def test_goes_on_from_a_saved_state_bitwise(make: Any) -> None:
    straight, broken = weights(torch.bfloat16), weights(torch.bfloat16)
    one, two = make(straight), make(broken)
    for step, grads in enumerate(gradients(6, torch.bfloat16)):
        one.step(grads, LR)
        two.step(grads, LR)
        if step == 2:
            saved = {name: t.clone() for name, t in two.state_dict().items()}
            broken = weights(torch.bfloat16, seed=9)
            two = make(broken)
            two.load_state_dict(saved)
    assert all(torch.equal(straight[name], broken[name]) for name in SHAPES)
    assert all(torch.equal(t, two.state_dict()[name]) for name, t in one.state_dict().items())


def test_compute_weights_are_the_rounded_master_and_stay_parameters() -> None:
    model = torch.nn.Linear(70, 30).bfloat16()
    inside = list(model.parameters())
    optimizer = AdamW(dict(model.named_parameters()))
    for seed in range(3):
        model.zero_grad()
        model(torch.randn(4, 70, generator=torch.Generator().manual_seed(seed)).bfloat16()).square().sum().backward()
        optimizer.step({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, LR)
    assert [id(p) for p in model.parameters()] == [id(p) for p in inside]
    for name, p in model.named_parameters():
        assert torch.equal(p, optimizer.state_dict()[f"master.{name}"].bfloat16())


def test_parts_of_a_model_take_the_steps_of_the_whole() -> None:
    """Two optimizers with half of the tensors each, and the squares of both: bitwise one optimizer."""
    whole, halves = weights(), weights()
    one = AdamW(whole, max_norm=0.7)
    split = (("a", "b"), ("c", "one", "long"))
    two = [AdamW({name: halves[name] for name in names}, max_norm=0.7) for names in split]
    for grads in gradients(5):
        found = one.step(grads, LR)
        squares = torch.cat([half.squares(grads) for half in two])
        for half in two:
            assert torch.equal(half.step(grads, LR, squares=squares).norm, found.norm)
    assert all(torch.equal(whole[name], halves[name]) for name in SHAPES)


# ---- 8 bits


def levels(signed: bool) -> Tensor:
    """All levels of the dynamic tree, from its description: powers of ten, then steps of equal width up to the next."""
    found = [0.0]
    bits = 6 if signed else 7
    for zeros in range(bits, -1, -1):
        count = 2 ** (bits - zeros)
        found += [10.0**-zeros * (0.1 + 0.9 * j / count) for j in range(1, count + 1)]
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_the_nearest_levels(signed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(40 * GROUP, generator=generator, dtype=torch.float64) * 10 ** (
        -9 * torch.rand(40 * GROUP, generator=generator, dtype=torch.float64)
    )
    values = values if signed else values.abs()
    quantized = encode(values, signed)
    share = values.view(-1, GROUP).abs() / values.view(-1, GROUP).abs().amax(1, keepdim=True)
    table = levels(signed)
    nearest = table[(share[..., None] - table).abs().argmin(-1)]
    if not signed:
        nearest = nearest.clamp_min(float(table[1]))
    got = decode(quantized, signed, torch.float64).view(-1, GROUP) / quantized.scales.double()[:, None]
    torch.testing.assert_close(got.abs(), nearest, rtol=1e-12, atol=0)
    again = encode(got.view(-1) * quantized.scales.double().repeat_interleave(GROUP), signed)
    assert torch.equal(again.codes, quantized.codes)
    torch.testing.assert_close(again.scales, quantized.scales, rtol=1e-6, atol=0)


def test_zeros_are_codes_of_zero() -> None:
    for signed in (True, False):
        assert not decode(encode(torch.zeros(GROUP), signed), signed).any()
    assert not decode(Coded(torch.full((GROUP,), 128, dtype=torch.uint8), torch.ones(1)), True).any()


def regression_loss(make: Callable[[Named], Optimizer]) -> float:
    generator = torch.Generator().manual_seed(0)
    x, hidden = torch.randn(512, 32, generator=generator), torch.randn(32, 8, generator=generator)
    y = torch.tanh(x @ hidden)
    params = {"w1": torch.randn(32, 64, generator=generator) / 6, "w2": torch.randn(64, 8, generator=generator) / 8}
    optimizer = make(params)
    loss = torch.zeros(())
    for step in range(400):
        leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
        loss = (torch.tanh(x @ leaves["w1"]) @ leaves["w2"] - y).square().mean()
        grads = torch.autograd.grad(loss, list(leaves.values()))
        optimizer.step(dict(zip(leaves, grads)), 1e-2 * (1 - step / 400))
    return float(loss.detach())


def test_eight_bits_learn_what_thirty_two_do() -> None:
    """A fit with noise left: the loss ends a fifth higher, which is a 3,000th of what it began with."""
    wide = regression_loss(lambda p: AdamW(p, weight_decay=0.0))
    quantized = regression_loss(lambda p: AdamW8bit(p, weight_decay=0.0))
    still = regression_loss(lambda p: SGD(p))
    assert quantized < 1.25 * wide < 0.01 * still, (wide, quantized, still)


def test_state_of_eight_bits_is_six_bytes_a_parameter() -> None:
    optimizer = AdamW8bit({"w": torch.zeros(1024, 1024)})
    held = sum(t.nbytes for name, t in optimizer.state_dict().items() if name != "control")
    assert held == 1024 * 1024 * (4 + 1 + 1) + 2 * 4 * 1024 * 1024 // GROUP


# ---- Muon


@pytest.mark.parametrize("shape", [(48, 32), (32, 48), (32, 32)])
def test_orthogonalizing_is_the_polynomial_on_singular_values(shape: tuple[int, int]) -> None:
    u = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    left, s, right = torch.linalg.svd(u, full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    torch.testing.assert_close(orthogonalized(u, torch.float64), (left * s) @ right, rtol=1e-9, atol=1e-10)


def muon_in_float64(start: Tensor, grads: list[Tensor]) -> Tensor:
    p, buffer = start.double(), torch.zeros_like(start, dtype=torch.float64)
    for grad in grads:
        buffer = 0.95 * buffer + 0.05 * grad.double()
        update = 0.05 * grad.double() + 0.95 * buffer
        p = p * (1 - LR * 0.1) - LR * 0.2 * math.sqrt(max(p.shape)) * orthogonalized(update, torch.float64)
    return p


@pytest.mark.parametrize("shape", [(64, 32), (32, 96)])
def test_muon_is_as_near_to_float64_as_torchs(shape: tuple[int, int]) -> None:
    """Both orthogonalise in bfloat16, in another order of operations."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(shape, generator=generator)
    given = [torch.randn(shape, generator=generator) for _ in range(10)]
    ours, theirs = start.clone(), start.clone().requires_grad_()
    one = Muon({"x": ours}, muon=lambda name, p: True, weight_decay=0.1)
    two = torch.optim.Muon([theirs], lr=LR, momentum=0.95, weight_decay=0.1, nesterov=True, adjust_lr_fn="match_rms_adamw")
    for grad in given:
        theirs.grad = grad.clone()
        one.step({"x": grad}, LR)
        two.step()
    want = muon_in_float64(start, given)
    error = float((ours - want).norm())
    assert error < 1.2 * float((theirs.detach() - want).norm())
    assert error < 0.02 * float((want - start).norm())


def test_muon_leaves_the_rest_to_adamw() -> None:
    params = {"embed.weight": torch.randn(50, 8), "mlp.weight": torch.randn(8, 8), "norm.weight": torch.randn(8)}
    alone = {name: p.clone() for name, p in params.items() if name != "mlp.weight"}
    both, adamw = Muon(params), AdamW(alone)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        grads = {name: torch.randn(p.shape, generator=generator) for name, p in params.items()}
        both.step(grads, LR)
        adamw.step(grads | {}, LR)
    assert all(torch.equal(params[name], alone[name]) for name in alone)


# ---- bad input


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: AdamW({}), "no parameters"),
        (lambda: AdamW({"a": torch.zeros(2), "b": torch.zeros(2).bfloat16()}), "one dtype and device"),
        (lambda: AdamW({"a": torch.zeros(2).double()}), "wanted float32, bfloat16 or float16"),
        (lambda: AdamW(dict.fromkeys(("a", "b"), torch.zeros(2))), "a and b share the same memory"),
        (lambda: AdamW({"a": torch.zeros(2)}, betas=(0.9, 1.0)), "betas are"),
        (lambda: AdamW({"a": torch.zeros(2)}, max_norm=0.0), "max_norm is 0.0"),
        (lambda: Muon({"a": torch.zeros(2)}), "at least one hidden matrix"),
        (lambda: Muon({"a": torch.zeros(2, 2, 2)}, muon=lambda name, p: True), "use AdamW for it"),
        (lambda: AdamW({"a": torch.zeros(2)}).step({}, LR), "there is no gradient for a"),
        (lambda: AdamW({"a": torch.zeros(2)}).step({"a": torch.zeros(3)}, LR), r"gradient of a has shape \(3,\)"),
        (
            lambda: AdamW({"a": torch.zeros(2), "b": torch.zeros(2)}).step(
                {"a": torch.zeros(2), "b": torch.zeros(2).bfloat16()}, LR
            ),
            "must all have one dtype and be on cpu",
        ),
        (lambda: AdamW({"a": torch.zeros(2)}).load_state_dict(SGD({"a": torch.zeros(2)}).state_dict()), "exp_avg.a is missing"),
        (lambda: SGD({"a": torch.zeros(2)}).load_state_dict(SGD({"a": torch.zeros(3)}).state_dict()), "master.a is"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(call: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()
