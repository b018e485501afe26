"""Steps of random programs that several products share: attention in its many spellings, and gated products."""

from torch import Tensor

from tests.fuse.random_draw import Draw, Rejected


def _heads(d: Draw, x: str, heads: int, dim: int) -> str:
    """A value [B, T, C] as heads [B, H, T, D], behind a product of its own or of a layer that stands there."""
    width = d.width(x)
    fitting = [n for n, made in d.program.layers.items() if made.startswith(f"nn.Linear({width}, {heads * dim},")]
    made = (
        f"self.{d.one(*fitting)}"
        if fitting and d.chance(0.25)
        else d.layer(f"nn.Linear({width}, {heads * dim}, bias={d.chance(0.6)})")
    )
    y = f"{made}({x})"
    if d.chance(0.15):
        y = f"({y} * {d.one('0.5', '-1.0', '1.2')})"
    return d.step(d.one(
        f"{y}.unflatten(-1, ({heads}, {dim})).transpose(1, 2)",
        f"{y}.view({x}.shape[0], {x}.shape[1], {heads}, {dim}).transpose(1, 2)",
        f"{y}.reshape({x}.shape[0], -1, {heads}, {dim}).permute(0, 2, 1, 3)",
    ))  # fmt: skip


def _mask(d: Draw, q: str, k: str) -> str:
    """A mask for scores of q and k, as an expression."""
    (_, heads, rows, _), columns = d.shape(q), d.shape(k)[2]
    other = d.values[1]
    sizes = [(d.shape(q)[0], other[q].shape[0]), (heads, heads), (rows, other[q].shape[2]), (columns, other[k].shape[2])]
    shape = [size if d.chance(0.5) else (1, 1) for size in sizes[:3]] + [sizes[3]]
    if d.chance(0.2):
        shape = shape[2:]
    first, second = tuple(s[0] for s in shape), tuple(s[1] for s in shape)
    kind = d.one("bool", "mask", "float", "causal", "bias", "distance")
    if kind in ("bool", "mask", "float"):
        return d.input(first, second, kind)
    square = f"{q}.shape[2], {k}.shape[2]"
    if kind == "causal":
        return d.one(
            f"torch.ones({square}, dtype=torch.bool).tril()", f"torch.full(({square}), float('-inf'), dtype={q}.dtype).triu(1)",
            f"torch.ones({square}, dtype=torch.bool).tril({k}.shape[2] - {q}.shape[2])",
            f"(torch.arange({k}.shape[2])[None] <= torch.arange({q}.shape[2])[:, None])",
        )  # fmt: skip
    if kind == "bias":
        if first != second:
            raise Rejected
        return d.param(*first)
    return f"({d.param(heads, 1, 1)} * (torch.arange({k}.shape[2]) - torch.arange({q}.shape[2])[:, None]).to({q}.dtype) * 0.3)"


def attention(d: Draw) -> None:
    """Scaled dot product attention, of torch or written out, behind three products."""
    x = d.pick(lambda t: t.ndim == 3)
    heads, dim = d.one((1, 8), (2, 4), (2, 8), (4, 4))
    source = x if d.chance(0.75) else d.pick(lambda t: t.ndim == 3 and t.shape[0] == d.of(x).shape[0])
    shared = d.one(1, 1, 1, 2) if heads > 1 else 1
    q, k, v = _heads(d, x, heads, dim), _heads(d, source, heads // shared, dim), _heads(d, source, heads // shared, dim)
    if d.chance(0.1):
        k = d.step(f"{k}[:1]")
    if d.chance(0.4):
        y = _written_out(d, q, k, v, shared)
    else:
        options = d.one("", "", "", f", attn_mask={_mask(d, q, k)}", f", attn_mask={_mask(d, q, k)}", ", is_causal=True")
        options += d.one("", "", "", ", scale=0.3", ", scale=-0.5", ", scale=0.0") + (", enable_gqa=True" if shared > 1 else "")
        y = d.step(f"F.scaled_dot_product_attention({q}, {k}, {v}{options})")
    if d.chance(0.8):
        y = d.step(f"{y}.transpose(1, 2).{d.one('flatten(2)', f'reshape({x}.shape[0], -1, {heads * dim})')}")
        if d.chance(0.7):
            width = d.width(x)
            y = d.step(f"{d.layer(f'nn.Linear({heads * dim}, {width})')}({y})")
            if d.chance(0.6):
                d.step(d.one(f"{x} + {y}", f"{y} + {x}"))


def _written_out(d: Draw, q: str, k: str, v: str, shared: int) -> str:
    if shared > 1:
        k, v = d.step(f"{k}.repeat_interleave({shared}, 1)"), d.step(f"{v}.repeat_interleave({shared}, 1)")
    scale = d.one(" * 0.35", " / 2.0", " / 8**0.5", "", " * -0.5")
    if d.chance(0.3):
        q = d.step(f"{q}{scale}")
        scale = ""
    products = (f"{q} @ {k}.transpose(-2, -1)", f"torch.matmul({q}, {k}.mT)", f"torch.einsum('bhqd,bhkd->bhqk', {q}, {k})")
    scores = d.step(d.one(*products) + scale)
    if d.chance(0.5):
        mask = _mask(d, q, k)
        floats = (
            "bool" not in mask
            and "<=" not in mask
            and not (mask.startswith("a") and any(i.name == mask and i.kind == "bool" for i in d.program.inputs))
        )
        low = d.one("-1e9", "float('-inf')")
        scores = d.step(
            f"{scores} + {mask}"
            if floats
            else d.one(f"{scores}.masked_fill(~{mask}, {low})", f"torch.where({mask}, {scores}, {low})")
        )
    dim = d.one(-1, -1, -1, -1, 3, -2)
    spelled = (
        f"{scores}.softmax({dim})",
        f"F.softmax({scores}, dim={dim})",
        f"F.dropout(F.softmax({scores}, {dim}), 0.1, False)",
    )
    weights = d.step(d.one(*spelled))
    return d.step(d.one(f"{weights} @ {v}", f"torch.matmul({weights}, {v})", f"{weights} @ {v} * 0.5"))


def differential(d: Draw) -> None:
    """Two attentions that read some of the same products."""
    x = d.pick(lambda t: t.ndim == 3)
    some = [_heads(d, x, 2, 4) for _ in range(d.one(3, 4, 5))]
    one, two = d.rng.choices(some, k=3), d.rng.choices(some, k=3)
    first = d.step(f"F.scaled_dot_product_attention({', '.join(one)})")
    second = d.step(f"F.scaled_dot_product_attention({', '.join(two)}{d.one('', ', is_causal=True')})")
    d.step(d.one(f"{first} - {second} * 0.5", f"{first} + {second}", f"({first} - {second}).transpose(1, 2).flatten(2)"))


def rope(d: Draw) -> None:
    """Heads rotated by angles of their positions."""
    x = d.pick(lambda t: t.ndim == 4 and t.shape[-1] % 2 == 0 and t.shape[-1] >= 4)
    dim = d.width(x)
    angle = d.step(f"torch.arange({x}.shape[2])[:, None].to({x}.dtype) * {d.layer(f'torch.rand({dim // 2})')}")
    both = d.step(f"torch.cat([{angle}, {angle}], -1)")
    half = d.one(
        f"torch.cat([-{x}[..., {dim // 2}:], {x}[..., :{dim // 2}]], -1)",
        f"torch.cat([{x}[..., {dim // 2}:], -{x}[..., :{dim // 2}]], -1)",
    )
    d.step(f"{x} * {both}.cos() + {half} * {both}.sin()")


def gated(d: Draw) -> None:
    """act(a) * b of two products, of parts of one, of parts that are not halves."""
    x = d.pick(lambda t: t.ndim >= 2)
    width, n = d.width(x), d.one(4, 8, 12)
    act = d.one("F.silu", "F.gelu", "torch.sigmoid", "F.relu", "torch.tanh")
    if d.chance(0.4):
        a, b = (d.step(f"{d.layer(f'nn.Linear({width}, {n}, bias={d.chance(0.5)})')}({x})") for _ in range(2))
    else:
        h = d.step(f"{d.layer(f'nn.Linear({width}, {2 * n}, bias={d.chance(0.5)})')}({x})")
        if d.chance(0.4):
            parts = d.step(d.one(f"{h}.chunk(2, -1)", f"{h}.chunk(2, dim={len(d.shape(x)) - 1})", f"{h}.split({n}, -1)"))
            a, b = f"{parts}[0]", f"{parts}[1]"
        else:
            starts = d.one((0, n), (0, n), (n // 2, n), (0, n // 2), (0, 0))
            step = d.one(1, 1, 2)
            a, b = (f"{h}[..., {s}:{s + n}:{step}]" for s in starts)
            if d.chance(0.2):
                a, b = f"{h}[..., ::2]", f"{h}[..., 1::2]"
        if d.chance(0.5):
            a, b = b, a
    y = d.step(d.one(f"{act}({a}) * {b}", f"{b} * {act}({a})", f"{act}({a}) * {act}({b})", f"{act}({a}) + {b}"))
    if d.chance(0.5):
        y = d.step(f"{d.layer(f'nn.Linear({d.width(y)}, {width})')}({y})")
        if isinstance(d.of(x), Tensor) and d.shape(x) == d.shape(y) and d.chance(0.7):
            d.step(f"{x} + {y}")


def block(d: Draw) -> None:
    """A whole layer of torch's own."""
    x = d.pick(lambda t: t.ndim == 3 and t.shape[-1] % 2 == 0)
    width = d.width(x)
    act = d.one("'gelu'", "'relu'")
    made = d.one(
        f"nn.TransformerEncoderLayer({width}, 2, 12, batch_first=True, norm_first={d.chance(0.5)}, activation={act})",
        f"nn.MultiheadAttention({width}, 2, batch_first=True, bias={d.chance(0.5)})", f"nn.LSTM({width}, 6, batch_first=True)",
        f"nn.GRU({width}, 4, bidirectional=True, batch_first=True)",
    )  # fmt: skip
    layer = d.layer(made)
    if "Multihead" in made:
        y = d.step(f"{layer}({x}, {x}, {x}, need_weights={d.chance(0.3)})")
        d.step(f"{y}[0]")
    elif "Encoder" in made:
        d.step(f"{layer}({x})")
    else:
        y = d.step(f"{layer}({x})")
        d.step(f"{y}[0]")
