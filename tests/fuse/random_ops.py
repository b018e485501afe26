"""What random programs are made of: each function adds one or more steps to a `Draw`, or raises `Rejected`.

They need not be careful: what torch refuses on either set of sizes is dropped (random_draw.py).
"""

from collections.abc import Callable

from torch import Tensor

from tests.fuse.random_draw import Draw, Rejected

ACTIVATIONS = (
    "F.relu({x})", "F.gelu({x})", 'F.gelu({x}, approximate="tanh")', "F.silu({x})", "torch.sigmoid({x})", "torch.tanh({x})",
    "F.relu6({x})", "F.hardswish({x})", "F.hardsigmoid({x})", "F.hardtanh({x}, -0.7, 0.9)", "F.leaky_relu({x}, 0.1)",
    "F.elu({x}, 0.7)", "F.selu({x})", "F.celu({x}, 1.3)", "F.mish({x})", "F.softplus({x}, 2.0, 5.0)", "F.softsign({x})",
    "F.logsigmoid({x})", "F.tanhshrink({x})", "F.softshrink({x}, 0.2)", "{x}.clamp(min=0)", "{x}.clamp(-0.5, 1.0)",
    "torch.maximum({x}, {x} * 0.2)", "{x} * torch.sigmoid({x})", "{x} * torch.sigmoid(1.702 * {x})", "F.rrelu({x}, 0.1, 0.3)",
    "0.5 * {x} * (1.0 + torch.erf({x} * 0.7071067811865476))", "F.gelu({x}.double()).to({x}.dtype)",
    "F.threshold({x}, 0.1, 0.1)",
    "F.relu({x}, inplace=True)", "{x}.relu_()", "F.silu({x}, inplace=True)", "F.hardswish({x}, inplace=True)",
    "F.leaky_relu({x}, 0.2, inplace=True)", "F.relu6({x}, inplace=True)", "F.elu({x}, inplace=True)", "{x}.sigmoid_()",
    "{x}.clamp_(min=0)",
)  # fmt: skip
MODULES = (
    "nn.ReLU()", "nn.ReLU(inplace=True)", "nn.GELU()", "nn.SiLU(inplace=True)", "nn.PReLU()", "nn.Dropout(0.5)",
    "nn.Identity()",
    "nn.Hardswish(inplace=True)", "nn.ReLU6()", "nn.Softmax(-1)", "nn.Mish()", "nn.ELU()", "nn.GLU()", "nn.LogSigmoid()",
)  # fmt: skip


def _is(*ndims: int) -> Callable[[Tensor], bool]:
    return lambda t: t.ndim in ndims


def _at_least(ndim: int) -> Callable[[Tensor], bool]:
    return lambda t: t.ndim >= ndim


def _in_place(text: str) -> bool:
    return "_()" in text or "inplace=True" in text or "_(min" in text


def _flag(d: Draw, p: float = 0.5) -> bool:
    return d.chance(p)


def linear(d: Draw) -> None:
    """A product with a weight, written in one of the ways that people write it."""
    x = d.pick(_at_least(1))
    k, n = d.width(x), d.one(1, 4, 8, 12, 16)
    scale = k**-0.5
    bias = f", {d.param(n)}" if _flag(d) else ""
    ways: dict[str, Callable[[], str]] = {
        "module": lambda: f"{d.layer(f'nn.Linear({k}, {n}, bias={_flag(d, 0.7)})')}({x})",
        "functional": lambda: f"F.linear({x}, {d.param(n, k, scale=scale)}{bias})",
        "computed weight": lambda: f"F.linear({x}, {d.param(n, k, scale=scale)}.tanh(){bias})",
        "computed bias": lambda: f"F.linear({x}, {d.param(n, k, scale=scale)}, {d.param(n)}.exp())",
        "computed both": lambda: f"F.linear({x}, {d.param(n, k, scale=scale)} * {d.param(n, 1)}, {d.param(n)}.exp())",
        "matmul": lambda: f"{x} @ {d.param(k, n, scale=scale)}",
        "transposed": lambda: f"torch.matmul({x}, {d.param(n, k, scale=scale)}.t())",
        "einsum": lambda: f"torch.einsum('...k,nk->...n', {x}, {d.param(n, k, scale=scale)})",
        "weight first": lambda: f"{d.param(n, k, scale=scale)} @ {x}.transpose(-1, -2)",
        "sum first": lambda: f"{d.param(n)} + {x} @ {d.param(k, n, scale=scale)}",
    }
    if len(d.shape(x)) == 2:
        numbers = d.one("", ", beta=0.5", ", alpha=2", ", beta=0, alpha=0.5", ", beta=-1")
        ways["addmm"] = lambda: f"torch.addmm({d.param(n)}, {x}, {d.param(k, n, scale=scale)}{numbers})"
    if len(d.shape(x)) == 3:
        ways["batched"] = lambda: (
            f"torch.baddbmm({d.param(1, 1, n)}, {x}, {d.param(k, n, scale=scale)}.expand({x}.shape[0], -1, -1))"
        )
    d.step(ways[d.one("module", "module", "module", "functional", *ways)]())


def again(d: Draw) -> None:
    """A layer that stands there already, on another value."""
    layers = [
        n for n, made in d.program.layers.items() if made.startswith(("nn.Linear", "nn.Conv", "nn.LayerNorm", "nn.BatchNorm"))
    ]
    if not layers:
        raise Rejected
    name = d.one(*layers)
    x = d.pick(_at_least(1))
    text = f"self.{name}({x})"
    if d.program.layers[name].startswith("nn.Linear") and _flag(d, 0.4):
        scaled = d.one("", " * 0.5", ".neg()")
        text = f"F.linear({x}, self.{name}.weight{scaled})" if _flag(d) else f"F.linear({x}, self.{name}.weight.t())"
    d.step(text)


def tied(d: Draw) -> None:
    """An embedding whose table is a product's weight as well."""
    ids = [i.name for i in d.program.inputs if i.kind == "ids"]
    if not ids:
        raise Rejected
    width = d.one(4, 8, 16)
    extra = d.one("", ", padding_idx=0", ", scale_grad_by_freq=True")
    table = d.layer(f"nn.Embedding(11, {width}{extra})")
    shift = d.one("", ".flip(-1)", " % 3", "[:, :1]", "[..., ::2]", ".t()")
    x = d.step(f"{table}({d.one(*ids)}{shift})")
    if _flag(d, 0.4):
        y = d.step(f"F.layer_norm({x}, ({width},)) * 0.5")
        d.step(f"F.linear({y}, {table}.weight)")


def conv(d: Draw) -> None:
    """A convolution of one to three dimensions."""
    x = d.pick(_is(3, 4, 5))
    dims = len(d.shape(x)) - 2
    c, groups = d.width(x, 1), d.one(1, 1, 1, 2, 4, 0)
    groups = groups or c
    if c % groups:
        raise Rejected
    o = groups * d.one(1, 2, 3, 4) if groups > 1 else d.one(3, 4, 8, 12)
    kernel = tuple(d.one(1, 1, 2, 3, 3, 5) for _ in range(dims)) if _flag(d, 0.3) else d.one(1, 1, 2, 3, 3)
    more = d.one(
        "",
        "",
        ", padding=1",
        ", padding=1",
        ', padding="same"',
        ", stride=2",
        ", stride=2, padding=1",
        ", dilation=2, padding=2",
    )
    if more.startswith(", padding=1") and _flag(d, 0.15):
        more += f', padding_mode="{d.one("circular", "reflect", "replicate")}"'
    if _flag(d, 0.7):
        y = d.step(f"{d.layer(f'nn.Conv{dims}d({c}, {o}, {kernel}{more}, groups={groups}, bias={_flag(d, 0.6)})')}({x})")
    else:
        window = (kernel,) * dims if isinstance(kernel, int) else kernel
        weight = d.param(o, c // groups, *window, scale=0.4) + d.one("", "", ".tanh()", " * 1.5")
        bias = d.one("", "", f", {d.param(o)}.exp()")
        y = d.step(f"F.conv{dims}d({x}, {weight}{bias}{more.partition(', padding_mode')[0]}, groups={groups})")
    if _flag(d, 0.4):
        y = d.step(f"{d.layer(f'nn.BatchNorm{dims}d({o}, affine={_flag(d, 0.8)})')}({y})")
    _followed(d, y)


def conv_transposed(d: Draw) -> None:
    """A transposed convolution."""
    x = d.pick(_is(3, 4))
    dims, c = len(d.shape(x)) - 2, d.width(x, 1)
    groups = d.one(1, 1, 2)
    o = groups * d.one(2, 3, 4)
    more = d.one(
        "2, stride=2",
        "3, stride=2, padding=1, output_padding=1",
        "3, padding=1",
        "1",
        "4, stride=2, padding=1",
        "2, dilation=2",
    )
    y = d.step(f"{d.layer(f'nn.ConvTranspose{dims}d({c}, {o}, {more}, groups={groups}, bias={_flag(d)})')}({x})")
    _followed(d, y)


def _followed(d: Draw, y: str) -> None:
    """What often stands behind a product: a residual, an activation, either first, a scale of channels."""
    for _ in range(d.one(0, 0, 1, 2, 3)):
        same = [
            n
            for n, v in d.values[0].items()
            if isinstance(v, Tensor) and n != y and v.shape == d.of(y).shape and v.is_floating_point()
        ]
        ways = [d.one(*ACTIVATIONS).format(x=y), d.one(*ACTIVATIONS[:6]).format(x=y), f"{y} * {d.one(0.5, -2, 'True', '1')}"]
        if same:
            other = d.one(*same)
            ways += [
                f"{y} + {other}",
                f"{other} + {y}",
                f"{y}.add({other}, alpha={d.one(1, 2, 0.5, -1)})",
                f"{other} - {y}",
                f"{y} * {other}",
            ]
        ways += [f"{y} + {y}", f"{y} - 0.3"]
        if len(d.shape(y)) > 2:
            ways.append(f"{y} * {d.param(d.width(y, 1), *[1] * (len(d.shape(y)) - 2))}")
        text = d.one(*ways)
        if _in_place(text) and not d.writable(y):
            raise Rejected
        y = d.step(text)


def views(d: Draw) -> None:
    """A view, or several results that are."""
    x = d.pick(_at_least(1))
    shape, ndim = d.shape(x), len(d.shape(x))
    a, b = d.rng.randrange(-ndim, ndim), d.rng.randrange(-ndim, ndim)
    order = d.rng.sample(range(ndim), ndim)
    start, step = d.one(0, 1, 1, 2), d.one(1, 1, 2, 3)
    stop = d.one("", "", "-1", "3", "4")
    wider = [str(d.one(2, 3)), *[d.size(x, i) if s != 1 else str(d.one(1, 3)) for i, s in enumerate(shape)]]
    index = ", ".join([":"] * (a % ndim) + [f"{start}:{stop}:{step}"])
    ways = [
        f"{x}.transpose({a}, {b})", f"{x}.transpose({a}, {b}).contiguous()", f"{x}.permute({order})", f"{x}.unsqueeze({a})",
        f"{x}.squeeze({a})",
        f"{x}.flatten({min(a % ndim, b % ndim)}, {max(a % ndim, b % ndim)})", f"{x}[{index}]", f"{x}.mT", f"{x}.flip({a})",
        f"{x}.select({a}, {d.one(0, -1, 1)})", f"{x}.narrow({a}, {start}, 2)", f"{x}.movedim({a}, {b})", f"{x}[..., None]",
        f"{x}.contiguous()", f"{x}.clone()", f"{x}.detach()", f"{x}.roll(1, {a})", f"{x}.repeat_interleave(2, {a})",
        f"F.pad({x}, (1, 0))",
        f"{x}.expand({', '.join(wider)})",
    ]  # fmt: skip
    if d.fixed(x, a) and shape[a] % 2 == 0:
        rest = ", ".join(
            d.size(x, i) if i != a % ndim else d.one(f"2, {shape[a] // 2}", f"{shape[a] // 2}, 2") for i in range(ndim)
        )
        ways += [f"{x}.reshape({rest})", f"{x}.view({rest})", f"{x}.unflatten({a}, (2, -1))"]
    if ndim > 1:
        ways += [f"{x}.reshape(-1, {d.size(x, -1)})", f"{x}.flatten(1)", f"{x}.flatten(0, 1)"]
    if _flag(d, 0.25):
        parts = d.step(
            d.one(
                f"{x}.chunk({d.one(2, 3)}, {a})",
                f"{x}.split({d.one(1, 2, 3, 4)}, {a})",
                f"{x}.unbind({a})",
                f"torch.tensor_split({x}, 2, {a})",
            )
        )
        count = min(len(own[parts]) for own in d.values)
        for at in d.rng.sample(range(count), min(count, d.one(1, 2, 3))):
            d.step(f"{parts}[{at}]")
        return
    d.step(d.one(*ways))


def joined(d: Draw) -> None:
    """Values side by side."""
    x = d.pick(_at_least(1))
    a = d.rng.randrange(-len(d.shape(x)), len(d.shape(x)))
    others = [x if _flag(d, 0.2) else d.pick(lambda t: t.ndim == len(d.shape(x))) for _ in range(d.one(1, 1, 2))]
    names = [x, *others]
    d.rng.shuffle(names)
    d.step(d.one(f"torch.cat([{', '.join(names)}], {a})", f"torch.stack([{', '.join(names)}], {a})"))


def binary(d: Draw) -> None:
    """Arithmetic of two values, a number or a parameter."""
    x = d.pick(_at_least(1))
    last = [d.fixed(x, i) and _flag(d, 0.7) for i in range(len(d.shape(x)))]
    of = [s if keep else 1 for s, keep in zip(d.shape(x), last, strict=True)][d.rng.randrange(len(last)) :]
    other, number = d.pick(_at_least(1)), d.one("2", "0.5", "-1.5", "3", "1")
    y = d.one(x, *[other] * 5, *[d.param(*of)] * 2, f"{d.param(*of)}.sigmoid()", number)
    alpha = d.one("", ", alpha=2", ", alpha=0.5", ", alpha=-1")
    ways = [
        f"{x} + {y}", f"{y} + {x}", f"{x} * {y}", f"{y} * {x}", f"{x} - {y}", f"{y} - {x}", f"torch.add({x}, {y}{alpha})",
        f"torch.sub({x}, {y}{alpha})",
        f"torch.rsub({x}, {y}{alpha})", f"{x} / ({y} * {y} + 1)", f"{x} / 2", f"-{x}",
        f"torch.addcmul({x}, {x}, {d.param(1)}, value=0.5)",
        f"torch.lerp({x}, {x} * 2, 0.3)", f"{x}.double().mul(0.7).to({x}.dtype)", f"torch.where({x} > 0, {x}, {y})",
        f"torch.div({x} * 4, 0.7, rounding_mode='floor') + {x}", f"{x}.abs().sqrt()", f"{x}.exp().log1p()", f"{x} ** 2",
    ]  # fmt: skip
    in_place = [f"{x}.add_({y}{alpha})", f"{x}.mul_({y})", f"{x}.sub_({y})", f"{x}.neg_()", f"{x}.copy_({y})", f"{x}.div_(2)"]
    d.step(d.one(*in_place) if _flag(d, 0.12) and d.writable(x) else d.one(*ways))


def residual(d: Draw) -> None:
    """A sum of two values of one shape."""
    x = d.pick(_at_least(1))
    y = d.pick(lambda t: t.shape == d.of(x).shape)
    scaled = d.one(y, y, f"0.5 * {y}", f"{y} * {d.param(1)}", f"{d.param(d.width(y))} * {y}")
    d.step(
        d.one(f"{x} + {y}", f"{y} + {x}", f"{x} + {scaled}", f"{scaled} + {x}", f"torch.add({x}, {y}, alpha=0.5)", f"{x} - {y}")
    )


def activation(d: Draw) -> None:
    """One of torch's, as a function, in place or as a module."""
    x = d.pick(_at_least(1))
    text = d.one(*ACTIVATIONS).format(x=x) if _flag(d, 0.7) else f"{d.layer(d.one(*MODULES))}({x})"
    if (_in_place(text) or "self" in text) and not d.writable(x):
        raise Rejected
    d.step(text)


def norm(d: Draw) -> None:
    """A norm over the last dimensions, channels or groups, from a layer, by hand, or with a computed gamma."""
    x = d.pick(_at_least(2))
    c, last, dims = d.shape(x)[1], d.shape(x)[-1], len(d.shape(x)) - 2
    if _flag(d) and d.fixed(x, -1):
        root = f"torch.rsqrt({x}.pow(2).mean(-1, keepdim=True) + 1e-5)"
        d.step(d.one(
            f"{d.layer(f'nn.LayerNorm({last}, elementwise_affine={_flag(d, 0.7)})')}({x})",
            f"{d.layer(f'nn.RMSNorm({last}, eps={d.one(None, 1e-5)})')}({x})",
            f"F.layer_norm({x}, ({last},), {d.param(last)}, None, 1e-3)",
            f"F.layer_norm({x}, ({last},), {d.param(last)}.exp(), {d.param(last)} * 2)",
            f"F.layer_norm({x}, tuple({x}.shape[-2:]))", f"F.rms_norm({x}, ({last},), {d.param(last)}.exp(), 1e-4)",
            f"{x} * {root} * {d.param(last)}", f"{d.param(last)} * ({x} * {root})",
            f"F.normalize({x}, dim=-1)", f"({x} - {x}.mean(-1, keepdim=True)) / {x}.std(-1, keepdim=True)",
        ))  # fmt: skip
        return
    c = d.width(x, 1)
    mean, variance = d.param(c), d.layer(f"torch.rand({c}) + 0.5")
    kind, groups = min(dims, 3) or 1, d.one(*[n for n in (1, 2, 4, c) if c % n == 0])
    d.step(d.one(
        f"{d.layer(f'nn.BatchNorm{kind}d({c}, affine={_flag(d, 0.7)})')}({x})",
        *[f"{d.layer(f'nn.GroupNorm({groups}, {c})')}({x})"] * 2,
        f"F.silu({d.layer(f'nn.GroupNorm({groups}, {c})')}({x} + {x}.mean(tuple(range(2, {x}.dim())), keepdim=True)))",
        f"{d.layer(f'nn.InstanceNorm{kind}d({c}, affine={_flag(d)})')}({x})", f"F.group_norm({x}, 2, {d.param(c)}.exp())",
        f"F.batch_norm({x}, {mean}, {variance}, {d.param(c)}.exp(), {d.param(c)})", f"F.batch_norm({x}, {mean}, {variance})",
        f"F.instance_norm({x})", f"F.batch_norm({x}, {mean}, {variance}, None, {d.param(c)}, eps=0.1)",
    ))  # fmt: skip


def pool(d: Draw) -> None:
    """Pooling, resizing, a mean over pixels."""
    x = d.pick(_is(3, 4))
    dims = len(d.shape(x)) - 2
    mode = "bilinear" if dims == 2 else "linear"
    d.step(d.one(
        f"F.max_pool{dims}d({x}, {d.one('2', '3, 2, 1', '3, 1, 1', '2, 1', '2, ceil_mode=True', '2, dilation=2')})",
        f"F.avg_pool{dims}d({x}, {d.one('2', '3, 2, 1', '3, 1, 1, count_include_pad=False', '2, ceil_mode=True')})",
        f"F.adaptive_avg_pool{dims}d({x}, {d.one(1, 2, 3)})", f"F.adaptive_max_pool{dims}d({x}, {d.one(1, 2)})",
        f"F.interpolate({x}, scale_factor=2)", f'F.interpolate({x}, scale_factor=2, mode="{mode}")',
        f"F.pixel_shuffle({x}, 2)", f"{x}.mean({tuple(range(2, dims + 2))})", f"{x}.mean((-1,), keepdim=True)",
        f"F.lp_pool{dims}d({x}.abs() + 0.1, 2, 2)",
    ))  # fmt: skip


def squeeze_excite(d: Draw) -> None:
    """Channels scaled by what a small network makes of their means."""
    x = d.pick(_is(4))
    c = d.width(x, 1)
    mean = d.step(d.one(f"F.adaptive_avg_pool2d({x}, 1)", f"{x}.mean((2, 3), keepdim=True)"))
    few = d.step(f"F.{d.one('relu', 'silu')}({d.layer(f'nn.Conv2d({c}, 4, 1)')}({mean}))")
    gate = d.step(f"{d.one('torch.sigmoid', 'F.hardsigmoid')}({d.layer(f'nn.Conv2d(4, {c}, 1)')}({few}))")
    d.step(d.one(f"{x} * {gate}", f"{gate} * {x}"))


def growing(d: Draw) -> None:
    """Norms of concatenations, each of which has the operands of the one before and a convolution of what was there."""
    x = d.pick(_is(3, 4))
    kind = len(d.shape(x)) - 2
    last, pieces = x, [x]
    for _ in range(d.one(1, 2, 3)):
        pieces.append(d.step(f"{d.layer(f'nn.Conv{kind}d({d.width(last, 1)}, 4, 3, padding=1)')}({last})"))
        cat = d.step(f"torch.cat(({', '.join(pieces)}), {d.one(1, -1 - kind)})")
        y = f"{d.layer(f'nn.BatchNorm{kind}d({d.width(cat, 1)}, affine={_flag(d, 0.7)})')}({cat})"
        norm = d.step(d.one(y, f"F.relu({y})", f"F.silu({y})", f"F.leaky_relu({y})"))
        last = norm if _flag(d, 0.8) else x


def reduce(d: Draw) -> None:
    """A softmax, a mean, a sum."""
    x = d.pick(_at_least(2))
    a = d.rng.randrange(-len(d.shape(x)), len(d.shape(x)))
    d.step(d.one(
        f"{x}.softmax({a})", f"F.softmax({x}, {a})", f"F.log_softmax({x}, {a})", f"{x}.mean({a})",
        f"{x}.mean({a}, keepdim=True)", f"{x}.sum({a})",
        f"{x}.amax({a})", f"{x}.cumsum({a})", f"{x}.var({a}, keepdim=True)", f"torch.softmax({x} * 0.5, {a})",
        f"{x}.logsumexp({a})", f"{x}.mean()[None]",
    ))  # fmt: skip
