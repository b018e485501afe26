"""The Llama model and the optimiser that `train_bookworm.py` trains with, in plain PyTorch.

Parameter names are Hugging Face's, so `state_dict()` is the file. Parameters stay float32 while training and activations have
the dtype `compute`; loaded from a file, both may be bfloat16. Not supported: a key/value cache, padding, untied embeddings.

Shapes: B windows, T positions, H query heads, G kv heads, D head dim, V vocabulary, N matrices of R rows and C columns.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps) * self.weight.float()).to(x.dtype)


def joined(x: Tensor, *parts: nn.Module) -> Tensor:
    """The outputs of bias-free linear layers on one input, side by side: one GEMM in the input's dtype."""
    return F.linear(x, torch.cat([part.get_parameter("weight") for part in parts]).to(x.dtype))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in Hugging Face's convention: dimension i pairs with i + D/2. x[..., T, D], cos and sin [T, D/2]."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention; kv heads are repeated, which costs little at this size and suits every SDPA backend."""

    def __init__(self, config: dict) -> None:
        super().__init__()
        width, self.head_dim = config["hidden_size"], config["head_dim"]
        q, kv = config["num_attention_heads"] * self.head_dim, config["num_key_value_heads"] * self.head_dim
        self.q_proj, self.o_proj = nn.Linear(width, q, bias=False), nn.Linear(q, width, bias=False)
        self.k_proj, self.v_proj = nn.Linear(width, kv, bias=False), nn.Linear(width, kv, bias=False)
        self.widths = [q, kv, kv]

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        qkv = joined(x, self.q_proj, self.k_proj, self.v_proj).split(self.widths, -1)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in qkv)  # [B, H or G, T, D]
        group = q.shape[1] // k.shape[1]
        k, v = rotate(k, cos, sin).repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        attended = F.scaled_dot_product_attention(rotate(q, cos, sin), k, v, is_causal=True)
        return joined(attended.transpose(1, 2).flatten(-2), self.o_proj)


class MLP(nn.Module):
    def __init__(self, config: dict) -> None:
        super().__init__()
        width, ffn = config["hidden_size"], config["intermediate_size"]
        self.gate_proj, self.up_proj = nn.Linear(width, ffn, bias=False), nn.Linear(width, ffn, bias=False)
        self.down_proj = nn.Linear(ffn, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = joined(x, self.gate_proj, self.up_proj).chunk(2, -1)
        return joined(F.silu(gate) * up, self.down_proj)


class Block(nn.Module):
    def __init__(self, config: dict) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, config: dict) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(Block(config) for _ in range(config["num_hidden_layers"]))
        self.norm = RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        frequency = config["rope_theta"] ** -(torch.arange(0, config["head_dim"], 2).float() / config["head_dim"])
        angle = torch.arange(config["max_position_embeddings"]).float()[:, None] * frequency
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)


class Llama(nn.Module):
    """Hugging Face's LlamaForCausalLM with tied embeddings, from the dictionary of its config.json."""

    def __init__(self, config: dict, compute: torch.dtype) -> None:
        super().__init__()
        self.compute, self.model, self.bos_id = compute, Decoder(config), config["bos_token_id"]

    @property
    def device(self) -> torch.device:
        return self.model.cos.device

    def initialise(self, generator: torch.Generator) -> None:
        """Small normal weights; what writes to the residual stream starts at zero, so each block starts as identity."""
        for name, p in self.named_parameters():
            if p.ndim == 2:
                std = 0.02 if "embed" in name else 0.5 / math.sqrt(p.shape[1])
                nn.init.normal_(p, std=0.0 if "o_proj" in name or "down_proj" in name else std, generator=generator)

    def forward(self, ids: Tensor) -> Tensor:
        """ids[B, T] int64 -> logits[B, T, V] in the compute dtype; T at most max_position_embeddings."""
        body, length = self.model, ids.shape[1]
        # Looked up before the cast: the gradient of a frequent token is then summed in float32.
        x = body.embed_tokens(ids).to(self.compute)
        for layer in body.layers:
            x = layer(x, body.cos[:length], body.sin[:length])
        return joined(body.norm(x), body.embed_tokens)

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Mean nats a token; ids and targets [B, T] int64."""
        return F.cross_entropy(self(ids).float().flatten(0, 1), targets.flatten())


@torch.no_grad()
def nats(
    model: Llama, documents: list[np.ndarray], length: int, stride: int, max_windows: int | None = None
) -> tuple[float, int]:
    """Sum of -ln p over the documents' tokens and their count; each token counts once, in the window with most context."""
    rows = []  # (inputs, targets), targets that an earlier window counted are -100
    for ids in documents:
        for first in range(0, max(1, len(ids) - (length - stride)), stride):
            targets = np.full(length, -100, dtype=np.int64)
            piece = ids[first : first + length]
            targets[: len(piece)] = piece
            inputs = np.concatenate(([model.bos_id], np.maximum(targets[:-1], 0)))
            targets[: length - stride if first else 0] = -100
            rows.append((inputs, targets))
    rows = rows[:: max(1, len(rows) // max_windows)] if max_windows else rows
    total, count, device = 0.0, 0, model.device
    for first in range(0, len(rows), 16):
        inputs, targets = (torch.from_numpy(np.stack(x)).to(device) for x in zip(*rows[first : first + 16], strict=True))
        losses = F.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten(), reduction="none")
        total += losses.double().sum().item()
        count += int((targets >= 0).sum())
    return total, count


@torch.no_grad()
def sample(model: Llama, tokenizer: Tokenizer, prompt: str, tokens: int) -> str:
    """A continuation at temperature 0.8, without a cache: only to look at."""
    ids = torch.tensor([tokenizer.encode(prompt).ids], device=model.device)
    for _ in range(tokens):
        ids = torch.cat((ids, torch.multinomial((model(ids)[:, -1].float() / 0.8).softmax(-1), 1)), 1)
    return tokenizer.decode(ids[0].tolist())


def orthogonalise(g_NRC: Tensor) -> Tensor:
    """Bring all singular values of each matrix near 1: five quintic Newton-Schulz steps in bfloat16 (Jordan et al. 2024)."""
    x = g_NRC.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


class Optimiser:
    """Muon (https://kellerjordan.github.io/posts/muon) for the blocks' matrices, AdamW for the embedding and the norms.

    Matrices of one shape are stacked into one batch: four batched products a step instead of one for each matrix.
    """

    def __init__(self, model: nn.Module, lr_matrix: float, lr_embed: float, weight_decay: float) -> None:
        named = list(model.named_parameters())
        matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
        others = [p for name, p in named if p.ndim == 1 or "embed" in name]
        shapes = sorted({tuple(p.shape) for p in matrices})
        self.groups = [[p for p in matrices if tuple(p.shape) == shape] for shape in shapes]
        self.means = [torch.zeros_like(torch.stack([p.detach() for p in group])) for group in self.groups]
        self.adam = torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=weight_decay, fused=others[0].is_cuda)
        self.parameters = [p for _, p in named]
        self.lr_matrix, self.lr_embed, self.weight_decay = lr_matrix, lr_embed, weight_decay

    @torch.no_grad()
    def step(self, factor: float, momentum: float) -> None:
        """Clip the gradients' norm to 1, update with the learning rates times `factor`, drop the gradients."""
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for group, mean in zip(self.groups, self.means):
            gradient = torch.stack([p.grad for p in group if p.grad is not None])
            mean.lerp_(gradient, 1 - momentum)
            update = orthogonalise(gradient.lerp(mean, momentum)).float()
            lr = self.lr_matrix * factor
            scale = lr * max(1.0, update.shape[1] / update.shape[2]) ** 0.5
            for p, change in zip(group, update):
                p.mul_(1 - lr * self.weight_decay).sub_(change, alpha=scale)
        self.adam.param_groups[0]["lr"] = self.lr_embed * factor
        self.adam.step()
        for p in self.parameters:
            p.grad = None
