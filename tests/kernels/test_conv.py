"""What conformance cannot say of convolutions: torch's own answers and gradients, options, whole spaces on a GPU, bad input."""

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests import conformance
from tilewright import ops
from tilewright.hw.device import device_named, device_of
from tilewright.kernels.conv.conv import conv_op
from tilewright.kernels.conv.sm90_kernel import VIEWS_REACH_ON
from tilewright.kernels.conv.transpose.conv_transpose import conv_transpose_op
from tilewright.kernels.conv.weight_gradient.conv_weight_gradient import conv_weight_gradient_op, divisor
from tilewright.op import Inputs, Op, prefer

GPU = torch.cuda.is_available()
WHERE = "cuda" if GPU else "cpu"
DEVICE = device_of(0 if GPU else -1)
FORWARD: dict[int, tuple[Any, Any]] = {1: (F.conv1d, ops.conv1d), 2: (F.conv2d, ops.conv2d), 3: (F.conv3d, ops.conv3d)}
TRANSPOSED: dict[int, tuple[Any, Any]] = {
    1: (F.conv_transpose1d, ops.conv_transpose1d),
    2: (F.conv_transpose2d, ops.conv_transpose2d),
    3: (F.conv_transpose3d, ops.conv_transpose3d),
}


def compared(theirs: Any, ours: Any, tensors: list[Tensor], *options: Any) -> None:
    """Results, and the gradients of all tensors, against torch's in float64."""
    wide = [t.double().requires_grad_() for t in tensors]
    narrow = [t.to(WHERE).requires_grad_() for t in tensors]
    want, got = theirs(*wide, *options), ours(*narrow, *options)
    assert got.shape == want.shape
    weights = torch.randn(want.shape, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad(want, wide, weights.double())
    found = torch.autograd.grad(got, narrow, weights.to(WHERE))
    for g, w in zip((got, *found), (want, *gradients), strict=True):
        assert conformance.errors(g.detach().cpu(), w.detach())[0] < 1e-5


def drawn(dims: int, seed: int) -> tuple[random.Random, int, list[int], list[int], list[int], list[int]]:
    """(generator, groups, kernel, stride, padding, dilation)."""
    r = random.Random(seed)
    kernel, stride, dilation = ([r.choice(among) for _ in range(dims)] for among in ((1, 2, 3), (1, 2, 3), (1, 2)))
    padding = [min(r.choice((0, 1, 2)), d * (k - 1)) for k, d in zip(kernel, dilation, strict=True)]
    return r, r.choice((1, 2, 4)), kernel, stride, padding, dilation


@pytest.mark.parametrize(("dims", "seed"), [(1, 0), (1, 1), (2, 0), (2, 1), (3, 1)])
def test_as_torch(dims: int, seed: int) -> None:
    r, groups, kernel, stride, padding, dilation = drawn(dims, 10 * dims + seed)
    inputs = Inputs(seed=seed)
    x = inputs.randn(2, groups * r.choice((1, 3)), *(r.choice((4, 5) if dims == 3 else (5, 7)) for _ in range(dims)))
    weight = inputs.randn(groups * r.choice((1, 2, 4)), x.shape[1] // groups, *kernel)
    tensors = [x, weight, inputs.randn(weight.shape[0])]
    compared(*FORWARD[dims], tensors, stride, padding, dilation, groups)


@pytest.mark.parametrize(("dims", "seed"), [(1, 0), (1, 1), (2, 0), (2, 1), (3, 1)])
def test_transposed_as_torch(dims: int, seed: int) -> None:
    r, groups, kernel, stride, padding, dilation = drawn(dims, 20 * dims + seed)
    inputs = Inputs(seed=seed)
    x = inputs.randn(2, groups * r.choice((1, 3)), *(r.choice((2, 3) if dims == 3 else (3, 4)) for _ in range(dims)))
    weight = inputs.randn(x.shape[1], r.choice((1, 2, 4)), *kernel)
    extra = [r.randrange(max(s, d)) for s, d in zip(stride, dilation, strict=True)]
    tensors = [x, weight, inputs.randn(weight.shape[1] * groups)]
    compared(*TRANSPOSED[dims], tensors, stride, padding, extra, groups, dilation)


def test_a_depth_of_one_tap() -> None:
    """Where the first of three dims has no filter but a border, it may not be taken for images."""
    inputs = Inputs(seed=3)
    tensors = [inputs.randn(1, 3, 3, 4, 4), inputs.randn(4, 3, 1, 3, 3), inputs.randn(4)]
    compared(*FORWARD[3], tensors, 1, (1, 1, 1))
    compared(*TRANSPOSED[3], [inputs.randn(1, 4, 3, 4, 4), tensors[1], inputs.randn(3)], 1, (0, 1, 1))


def test_epilogue_with_gradients() -> None:
    """relu(conv + bias + residual): the residual comes first, and an activation of its own launch gives the same."""
    inputs = Inputs(seed=4)
    x, weight, bias = inputs.randn(2, 6, 5, 5), inputs.randn(8, 6, 3, 3), inputs.randn(8)
    residual = inputs.randn(2, 8, 5, 5)

    def theirs(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        return F.relu(F.conv2d(x, weight, bias, padding=1) + residual)

    def ours(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        return ops.conv2d(x, weight, bias, padding=1, activation="relu", residual=residual)

    compared(theirs, ours, [x, weight, bias, residual])
    fused = ours(*(t.to(WHERE) for t in (x, weight, bias, residual)))
    assert conformance.errors(fused.cpu(), theirs(*(t.double() for t in (x, weight, bias, residual))))[0] < 1e-5


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("padding", ["same", ((1, 2), (0, 1))])
def test_borders(mode: str, padding: Any) -> None:
    inputs = Inputs(seed=5)
    x, weight = inputs.randn(2, 4, 6, 7), inputs.randn(4, 4, 4, 3)
    rows, cols = ((1, 2), (1, 1)) if padding == "same" else padding
    filled = F.pad(x.double(), (*cols, *rows), mode="constant" if mode == "zeros" else mode)
    got = ops.conv2d(x.to(WHERE), weight.to(WHERE), padding=padding, padding_mode=mode)
    assert conformance.errors(got.cpu(), F.conv2d(filled, weight.double()))[0] < 1e-5


def test_memory_formats() -> None:
    """Any format in, channels_last out; without images, without a batch."""
    inputs = Inputs(seed=6)
    x, weight = inputs.randn(2, 16, 5, 6).to(WHERE), inputs.randn(8, 16, 3, 3).to(WHERE)
    want = ops.conv2d(x, weight, padding=1)
    assert want.is_contiguous(memory_format=torch.channels_last)
    last = ops.conv2d(x.to(memory_format=torch.channels_last), weight.to(memory_format=torch.channels_last), padding=1)
    assert torch.equal(last, want)
    # One image of two may have other last bits: the library on a CPU chooses its sums by the number of images.
    assert torch.equal(ops.conv2d(x[0], weight, padding=1), ops.conv2d(x[:1], weight, padding=1)[0])
    assert ops.conv2d(x[:0], weight, padding=1).shape == (0, 8, 5, 6)
    assert ops.conv_transpose2d(x[:0], weight.transpose(0, 1).contiguous(), stride=2).shape == (0, 8, 11, 13)


def test_batch_norm_is_folded() -> None:
    inputs = Inputs(seed=7)
    x, weight, bias = inputs.randn(2, 6, 5, 5), inputs.randn(8, 6, 3, 3), inputs.randn(8)
    mean, scale, shift, variance = inputs.randn(8), inputs.randn(8), inputs.randn(8), inputs.randn(8).square().add(0.1)
    for given in ((bias, mean, variance, scale, shift), (None, mean, variance, None, None)):
        folded = ops.fold_batch_norm(weight, *given)
        norm: list[Any] = [None if t is None else t.double() for t in given]
        wide: Any = F.conv2d(x.double(), weight.double(), norm[0])
        want = F.batch_norm(wide, *norm[1:])
        got = ops.conv2d(x.to(WHERE), folded[0].to(WHERE), folded[1].to(WHERE))
        assert conformance.errors(got.cpu(), want)[0] < 1e-5


def test_integers_are_summed_exactly() -> None:
    """A sum that rises to 2^24 in odd steps and falls again: in float32 it would not come back."""
    x = Inputs(seed=8).randint(120, 128, 1, 2, 2, 1024, dtype=torch.int8)
    weight = Inputs(seed=9).randint(120, 128, 3, 1, 1, 1024, dtype=torch.int8)
    x, weight = torch.cat([x, x], -1), torch.cat([weight, -weight], -1)
    x[..., -1] -= 1
    for name in (impl.name for impl in conv_op.impls if impl.name != "vendor"):
        with prefer(name):
            y = ops.conv2d(
                x.movedim(-1, 1).to(WHERE), weight.movedim(-1, 1).to(WHERE),
                x_scales=torch.ones(1, device=WHERE), w_scales=torch.ones(3, device=WHERE),
            )  # fmt: skip
        assert torch.equal(y[0].float().cpu(), -weight[:, 0, 0, -1].float().view(3, 1, 1).expand(3, 2, 2))


@pytest.mark.parametrize(
    ("op", "dims", "name"),
    [
        (conv_op, {"C": 64, "H": 56, "O": 64}, "sm90"),
        (conv_op, {"C": 64, "H": 56, "O": 256, "K": 1}, "linear"),
        (conv_op, {"C": 64, "H": 56, "O": 256, "K": 1, "residual": True, "activation": "relu"}, "sm90"),
        (conv_op, {"C": 256, "H": 14, "O": 1024, "K": 1, "residual": True, "activation": "relu"}, "vendor"),
        (conv_op, {"N": 1, "C": 256, "H": 14, "O": 1024, "K": 1, "residual": True, "activation": "relu"}, "few"),
        (conv_op, {"N": 1, "C": 128, "H": 28, "O": 512, "K": 1, "residual": True, "activation": "relu"}, "triton"),
        (conv_op, {"N": 1, "C": 64, "H": 56, "O": 64}, "few"),
        (conv_op, {"N": 1, "C": 64, "H": 56, "O": 256, "K": 1}, "linear"),
        (conv_op, {"C": 96, "H": 56, "O": 96, "K": 7, "groups": 96}, "depthwise"),
        (conv_op, {"C": 512, "H": 14, "O": 512, "S": 2}, "vendor"),
        (conv_op, {"C": 64, "H": 56, "O": 64, "dtype": torch.float32}, "vendor"),
        (conv_op, {"C": 64, "H": 56, "O": 64, "dtype": torch.int8}, "sm90"),
        (conv_op, {"C": 256, "H": 28, "O": 256, "groups": 32}, "narrow"),
        (conv_transpose_op, {"C": 256, "H": 32, "O": 128, "S": 2}, "phases"),
        (conv_transpose_op, {"C": 256, "H": 32, "O": 96, "S": 2}, "triton"),
        (conv_transpose_op, {"C": 128, "H": 32, "O": 64, "K": 3, "P": 1}, "sm90"),
        (conv_weight_gradient_op, {"C": 64, "H": 56, "O": 64}, "sm90"),
        (conv_weight_gradient_op, {"C": 256, "H": 14, "O": 256}, "vendor"),
    ],
    ids=lambda value: value.name if isinstance(value, Op) else None,
)
def test_what_an_h100_takes(op: Op, dims: dict[str, Any], name: str) -> None:
    if not VIEWS_REACH_ON and name in ("narrow", "phases", "sm90") and (name != "sm90" or op is conv_weight_gradient_op):
        pytest.skip("the installed Triton has no views of shared memory that reach beyond their part, which this kernel needs")
    make: Any = op.make
    assert op.choose(device_named("h100"), op.problem(*make(Inputs("meta"), **{"N": 32, **dims}))).impl.name == name


def test_divisors() -> None:
    r = random.Random(0)
    for _ in range(2000):
        d, n = r.choice((1, 2, 3, 7, r.randrange(1, 1 << 30))), r.choice((0, 1, (1 << 30) - 1, r.randrange(1 << 30)))
        for value in {n, n // d * d, max(0, n // d * d - 1)}:
            factor, shift = divisor(d)
            assert factor < 1 << 31
            assert (4 * value * factor >> 32) >> shift == value // d


@pytest.mark.skipif(not DEVICE.runs_triton, reason="no GPU here: kernels are checked in the TRITON_INTERPRET=1 run")
@pytest.mark.parametrize(
    ("op", "name", "dims", "config"),
    [
        (conv_weight_gradient_op, "triton", {"N": 3, "C": 20, "H": 9, "O": 24}, {"BLOCK_M": 64, "BLOCK_N": 64, "SPLIT": 4}),
        (conv_weight_gradient_op, "triton", {"N": 1, "C": 64, "H": 8, "O": 70}, {"BLOCK_M": 128, "BLOCK_N": 128, "SPLIT": 1}),
        (conv_op, "triton", {"N": 1, "C": 48, "H": 9, "O": 136}, {"BLOCK_M": 128, "BLOCK_N": 128}),
        (conv_op, "few", {"N": 2, "C": 40, "H": 7, "O": 40, "bias": True}, {"BLOCK_N": 32, "SPLIT_K": 4}),
        (conv_op, "depthwise", {"N": 1, "C": 40, "H": 9, "O": 40, "groups": 40}, {"COLS": 2}),
        (conv_transpose_op, "triton", {"N": 1, "C": 20, "H": 5, "O": 136, "S": 2}, {"BLOCK_M": 128, "BLOCK_N": 128}),
    ],
    ids=lambda value: value.name if isinstance(value, Op) else None,
)
def test_configs_beside_the_default(op: Op, name: str, dims: dict[str, Any], config: dict[str, Any]) -> None:
    impl = next(impl for impl in op.impls if impl.name == name)
    make: Any = op.make
    args = make(Inputs(WHERE), **dims)
    conformance.check(op, impl, {**impl.space.default(DEVICE, op.problem(*args)), **config}, args)


@pytest.mark.skipif(not GPU, reason="walks whole spaces: no GPU here")
@pytest.mark.parametrize("op", [conv_op, conv_transpose_op, conv_weight_gradient_op], ids=lambda op: op.name)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8])
def test_every_config_matches_the_definition(op: Op, dtype: torch.dtype) -> None:
    if dtype == torch.int8 and op is not conv_op:
        pytest.skip(f"{op.name} does not take int8")
    make: Any = op.make
    for groups in (1, 4, 64):
        for stride in (1, 2):
            args = make(Inputs(WHERE), N=3, C=64, H=15, O=320 if groups < 64 else 64, S=stride, P=1, groups=groups, dtype=dtype)
            problem = op.problem(*args)
            for impl in op.impls:
                if impl.refusal(DEVICE, problem) is None:
                    for config in impl.space.configs(DEVICE, problem):
                        conformance.check(op, impl, config, args)


X, W, XT = torch.ones(1, 4, 5, 5), torch.ones(6, 4, 3, 3), torch.ones(4, 6, 3, 3)
EIGHT = torch.ones(1, 4, 5, 5, dtype=torch.int8), torch.ones(6, 4, 3, 3, dtype=torch.int8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.conv2d(X[0, 0], W), r"x must be \[N, C, H, W\] and weight have as many dims; got \[5, 5\]"),
        (lambda: ops.conv2d(X, W, groups=3), "groups must divide the channels of x .* got groups=3, 4 and 6"),
        (lambda: ops.conv2d(X, W, groups=2), "x has 4 channels, and a weight .* with groups=2 needs 8"),
        (lambda: ops.conv2d(X[..., :2], W), r"no output: x has \[5, 2\] pixels"),
        (lambda: ops.conv2d(X, W, dilation=3), r"no output: .* with dilation \[3, 3\]"),
        (
            lambda: ops.conv2d(X, W, padding_mode="mirror"),
            "padding_mode must be one of zeros, reflect, replicate, circular; got",
        ),
        (lambda: ops.conv2d(X, W, padding="full"), "padding must be numbers, 'same' or 'valid'; got 'full'"),
        (lambda: ops.conv2d(X, W, padding="same", stride=2), "padding='same' needs a stride of 1"),
        (lambda: ops.conv2d(X, W, stride=0), "stride must be one number or 2, each at least 1; got 0"),
        (lambda: ops.conv2d(X, W, padding=(1, 2, 3)), "padding must be one number or 2"),
        (lambda: ops.conv2d(X.int(), W.int()), "dtype must be one of torch.float16, torch.bfloat16, torch.float32, torch.int8"),
        (lambda: ops.conv2d(X, W.half()), "weight must have x's dtype, torch.float32; got torch.float16"),
        (lambda: ops.conv2d(X, W, torch.ones(5)), r"bias must be \[6\]; got \[5\]"),
        (lambda: ops.conv2d(X, W.to("meta")), "weight must be on x's device, cpu; got meta"),
        (lambda: ops.conv2d(X, W, activation="swish"), "activation must be one of none, relu"),
        (lambda: ops.conv2d(X, W, residual=torch.ones(1, 6, 5, 5)), r"residual must be \[1, 6, 3, 3\]"),
        (lambda: ops.conv2d(*EIGHT), "int8 operands need x_scales"),
        (lambda: ops.conv2d(*EIGHT, x_scales=torch.ones(2), w_scales=torch.ones(6)), r"x_scales must be \[1\] float32"),
        (lambda: ops.conv2d(*EIGHT, x_scales=torch.ones(1), w_scales=torch.ones(5)), r"w_scales must be \[6\] float32"),
        (lambda: ops.conv2d(X, W, x_scales=torch.ones(1)), "scales are for int8 operands only"),
        (lambda: ops.conv2d(X, W, dtype=torch.float16), "the result has x's dtype"),
        (lambda: ops.conv_transpose2d(X, XT, output_padding=1), "output_padding must be less than stride or dilation"),
        (lambda: ops.conv_transpose2d(X, W), "x has 4 channels, and a weight .* needs 6"),
        (lambda: ops.conv_transpose2d(X, XT, padding=4), r"no output: .* leave \[-1, -1\] pixels"),
        (lambda: ops.fold_batch_norm(W, None, torch.ones(5), torch.ones(6)), r"mean must be \[6\]; got \[5\]"),
    ],
)
def test_bad_input(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
