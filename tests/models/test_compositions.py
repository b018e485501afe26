"""Models of images, signals, tables and sentences against twins: their definitions in torch's functions, on the same weights.

A twin reads the model's state dict by name, so that the names, the shapes and the arithmetic are all held; so are gradients.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.models.encoder import Bert
from tilewright.models.signal import FCN, UNet
from tilewright.models.tabular import FTTransformer, TabularMLP
from tilewright.models.vision import ConvNeXt, ResNet, ViT, convnext_tiny, resnet18, resnet50, vit_b16
from tilewright.nn import Lengths

State = dict[str, Tensor]


def randn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def linear(s: State, name: str, x: Tensor) -> Tensor:
    return F.linear(x, s[f"{name}.weight"], s[f"{name}.bias"])


def layer_norm(s: State, name: str, x: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], s[f"{name}.weight"], s[f"{name}.bias"], eps)


def batch_norm(s: State, name: str, x: Tensor) -> Tensor:
    return F.batch_norm(
        x, s[f"{name}.running_mean"], s[f"{name}.running_var"], s[f"{name}.weight"], s[f"{name}.bias"]
    )  # fmt: skip


def attention(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(-2, -3) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(-2, -3).flatten(-2)


def resnet(s: State, x: Tensor, blocks: tuple[int, ...], bottleneck: bool) -> Tensor:
    """torchvision's, in eval mode."""
    x = F.max_pool2d(batch_norm(s, "bn1", F.conv2d(x, s["conv1.weight"], None, 2, 3)).relu(), 3, 2, 1)
    strided, depth = (2, 3) if bottleneck else (1, 2)
    for i, count in enumerate(blocks, 1):
        for j in range(count):
            at, stride, kept = f"layer{i}.{j}", 2 if i > 1 and j == 0 else 1, x
            if f"{at}.downsample.0.weight" in s:
                kept = batch_norm(s, f"{at}.downsample.1", F.conv2d(x, s[f"{at}.downsample.0.weight"], None, stride))
            for c in range(1, depth + 1):
                weight = s[f"{at}.conv{c}.weight"]
                x = F.conv2d(x, weight, None, stride if c == strided else 1, weight.shape[-1] // 2)
                x = batch_norm(s, f"{at}.bn{c}", x)
                x = (x + kept).relu() if c == depth else x.relu()
    return linear(s, "fc", x.mean((2, 3)))


def convnext(s: State, x: Tensor, blocks: tuple[int, ...]) -> Tensor:
    def last(x: Tensor) -> Tensor:
        return x.permute(0, 2, 3, 1)

    def first(x: Tensor) -> Tensor:
        return x.permute(0, 3, 1, 2)

    x = first(layer_norm(s, "stem.1", last(F.conv2d(x, s["stem.0.weight"], s["stem.0.bias"], 4)), 1e-6))
    for i, count in enumerate(blocks):
        at = f"stages.{i}"
        if i:
            x = first(layer_norm(s, f"{at}.downsample.0", last(x), 1e-6))
            x = F.conv2d(x, s[f"{at}.downsample.1.weight"], s[f"{at}.downsample.1.bias"], 2)
        for j in range(count):
            b = f"{at}.blocks.{j}"
            y = last(F.conv2d(x, s[f"{b}.conv_dw.weight"], s[f"{b}.conv_dw.bias"], padding=3, groups=x.shape[1]))
            y = linear(s, f"{b}.mlp.fc2", F.gelu(linear(s, f"{b}.mlp.fc1", layer_norm(s, f"{b}.norm", y, 1e-6))))
            x = x + first(y * s[f"{b}.gamma"])
    return linear(s, "head.fc", layer_norm(s, "head.norm", x.mean((2, 3)), 1e-6))


def vit(s: State, x: Tensor, layers: int, heads: int) -> Tensor:
    weight = s["patch_embed.proj.weight"]
    x = F.conv2d(x, weight, s["patch_embed.proj.bias"], weight.shape[-1]).flatten(2).mT
    x = torch.cat((s["cls_token"].expand(len(x), 1, -1), x), 1) + s["pos_embed"]
    for i in range(layers):
        b = f"blocks.{i}"
        q, k, v = linear(s, f"{b}.attn.qkv", layer_norm(s, f"{b}.norm1", x, 1e-6)).chunk(3, -1)
        x = x + linear(s, f"{b}.attn.proj", attention(q, k, v, heads))
        x = x + linear(s, f"{b}.mlp.fc2", F.gelu(linear(s, f"{b}.mlp.fc1", layer_norm(s, f"{b}.norm2", x, 1e-6))))
    return linear(s, "head", layer_norm(s, "norm", x, 1e-6)[:, 0])


def fcn(s: State, x: Tensor) -> Tensor:
    for i in range(3):
        x = batch_norm(s, f"norms.{i}", F.conv1d(x, s[f"convs.{i}.weight"], s[f"convs.{i}.bias"], padding="same")).relu()
    return linear(s, "head", x.mean(-1))


def unet(s: State, x: Tensor) -> Tensor:
    def block(at: str, x: Tensor) -> Tensor:
        for c in (1, 2):
            x = batch_norm(s, f"{at}.bn{c}", F.conv2d(x, s[f"{at}.conv{c}.weight"], padding=1)).relu()
        return x

    top = block("down.0", x)
    middle = block("down.1", F.max_pool2d(top, 2))
    x = block("down.2", F.max_pool2d(middle, 2))
    for i, beside in enumerate((middle, top)):
        up = F.conv_transpose2d(x, s[f"up.{i}.weight"], s[f"up.{i}.bias"], 2)
        x = block(f"back.{i}", torch.cat((beside, up), 1))
    return F.conv2d(x, s["head.weight"], s["head.bias"])


def mlp(s: State, numbers: Tensor, categories: Tensor) -> Tensor:
    x = torch.cat((numbers, *(s[f"tables.{i}.weight"][categories[:, i]] for i in range(2))), -1)
    for i in range(2):
        x = linear(s, f"layers.{i}", x).relu()
    return linear(s, "head", x)


def ft_transformer(s: State, numbers: Tensor, categories: Tensor, heads: int) -> Tensor:
    tokens = [numbers[:, i, None] * s["weight"][i] + s["bias"][i] for i in range(3)]
    tokens += [s[f"tables.{i}.weight"][categories[:, i]] + s["bias"][3 + i] for i in range(2)]
    x = torch.stack((s["cls"].expand(len(numbers), -1), *tokens), 1)
    for i in range(2):
        b = f"blocks.{i}"
        normed = layer_norm(s, f"{b}.attention_norm", x, 1e-5) if i else x
        q, k, v = linear(s, f"{b}.attention.qkv", normed).chunk(3, -1)
        x = x + linear(s, f"{b}.attention.out", attention(q, k, v, heads))
        up, gate = linear(s, f"{b}.gate_up", layer_norm(s, f"{b}.norm", x, 1e-5)).chunk(2, -1)
        x = x + linear(s, f"{b}.down", up * gate.relu())
    return linear(s, "head", layer_norm(s, "norm", x[:, 0], 1e-5).relu())


# Windows are counted, and channels summed, in float32 even where all else is float64.
FLOAT64: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6}
FLOAT32: dict[str, Any] = {"rtol": 1e-4, "atol": 2e-5}
IMAGE, ROW, KINDS = randn(2, 3, 32, 32), randn(4, 3), torch.tensor([[0, 1], [4, 0], [2, 1], [3, 1]])
CASES: dict[str, tuple[Callable[[], torch.nn.Module], Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "resnet, basic": (
        lambda: ResNet((1, 2), bottleneck=False, classes=5, width=8), lambda s, x: resnet(s, x, (1, 2), False), (IMAGE,)
    ),
    "resnet, bottleneck": (
        lambda: ResNet((2, 1), bottleneck=True, classes=5, width=4), lambda s, x: resnet(s, x, (2, 1), True), (IMAGE,)
    ),
    "convnext": (lambda: ConvNeXt((1, 2), (8, 12), classes=5), lambda s, x: convnext(s, x, (1, 2)), (IMAGE,)),
    "vit": (lambda: ViT(32, 8, 16, 2, 2, classes=5), lambda s, x: vit(s, x, 2, 2), (IMAGE,)),
    "fcn": (lambda: FCN(3, 5, (4, 6, 4), (7, 5, 3)), fcn, (randn(2, 3, 20),)),
    "unet": (lambda: UNet(3, 2, width=4, levels=2), unet, (IMAGE[..., :16],)),
    "tabular mlp": (lambda: TabularMLP(3, (5, 2), 2, widths=(8, 6), embedding=4), mlp, (ROW, KINDS)),
    "ft-transformer": (
        lambda: FTTransformer(3, (5, 2), 2, features=16, layers=2, heads=2),
        lambda s, x, kinds: ft_transformer(s, x, kinds, 2),
        (ROW, KINDS),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_equals_its_twin(name: str) -> None:
    build, twin, inputs = CASES[name]
    # Attention takes no float64.
    dtype, limits = (torch.float32, FLOAT32) if name in ("vit", "ft-transformer") else (torch.float64, FLOAT64)
    inputs = tuple(t.to(dtype) if t.is_floating_point() else t for t in inputs)
    torch.manual_seed(3)
    model = build().to(dtype).eval()
    state: dict[str, Any] = model.state_dict()
    for i, tensor in enumerate(state.values()):
        if tensor.is_floating_point():  # statistics and gammas that are no longer 0 or 1
            tensor.add_(0.1 * randn(*tensor.shape, seed=i).abs().to(dtype))
    leaves = dict(model.named_parameters())
    got, want = model(*inputs), twin(state | leaves, *inputs)
    torch.testing.assert_close(got, want, **limits)
    weight = randn(*got.shape, seed=9).to(dtype)
    grads = (torch.autograd.grad(y, list(leaves.values()), weight) for y in (got, want))
    for leaf, ours, theirs in zip(leaves, *grads, strict=True):
        torch.testing.assert_close(ours, theirs, **limits, msg=lambda m, leaf=leaf: f"{leaf}: {m}")


def test_models_train() -> None:
    """Batch statistics and dropout are on, and a step of gradient descent lowers the loss."""
    torch.manual_seed(0)
    model, target = ResNet((1, 1), bottleneck=False, classes=5, width=8), torch.tensor([1, 4])
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(4):
        loss = F.cross_entropy(model(IMAGE.float()), target)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]


def test_bert_is_that_of_transformers() -> None:
    bert = pytest.importorskip("transformers.models.bert.modeling_bert", reason="the oracle is transformers")
    torch.manual_seed(0)
    config = bert.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=20,
    )  # fmt: skip
    theirs, ours = bert.BertModel(config).eval(), Bert(50, 32, 2, 4, 64, 20)
    ours.load_state_dict(theirs.state_dict())
    ids, types = torch.randint(0, 50, (3, 7)), torch.randint(0, 2, (3, 7))
    want = theirs(ids, token_type_ids=types)
    got, pooled = ours(ids, token_types=types)
    torch.testing.assert_close(got, want.last_hidden_state, **FLOAT32)
    torch.testing.assert_close(pooled, want.pooler_output, **FLOAT32)
    # Packed: the first 4 tokens of one sequence and the whole of another, without padding.
    packed, places = torch.cat((ids[0, :4], ids[1])), torch.cat((torch.arange(4), torch.arange(7)))
    lengths = Lengths(cu=torch.tensor([0, 4, 11], dtype=torch.int32), longest=7)
    got, pooled = ours(packed, lengths, places)
    torch.testing.assert_close(got[:4], ours(ids[:1, :4])[0][0], **FLOAT32)
    torch.testing.assert_close(pooled[1], ours(ids[1:2])[1][0], **FLOAT32)
    with pytest.raises(ValueError, match="packed ids"):
        ours(packed)


@pytest.mark.parametrize(
    ("build", "parameters"),
    [
        (resnet18, 11_689_512),
        (resnet50, 25_557_032),
        (convnext_tiny, 28_589_128),
        (vit_b16, 86_567_656),
        (Bert, 109_482_240),
    ],
)  # fmt: skip
def test_sizes_are_the_published_ones(build: Callable[..., torch.nn.Module], parameters: int) -> None:
    model = build(device="meta")
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert all(p.requires_grad for p in model.parameters())


def test_sizes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="multiples of 4, got"):
        UNet(3, 2, width=4, levels=2)(torch.zeros(1, 3, 30, 32))
    with pytest.raises(ValueError, match="ViT: size must be a multiple of patch"):
        ViT(30, 16)
