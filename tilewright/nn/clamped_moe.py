"""A mixture of experts as gpt-oss has it (OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025): biases, a clamped gate.

    # T tokens, E features, X experts, K of them a token, I width of an expert
    weights = softmax of the K largest of router(x);   y = sum of w_i (down_i(act(gate_i(x), up_i(x))))
    act(g, u) = (u' + 1) g' sigmoid(alpha g'),   g' = min(g, limit),   u' = u clamped to [-limit, limit]

By plain products: every expert multiplies every token of a piece of at most `PIECE_TOKENS`. Sums over experts are float32.
Not here: what nn.MoE leaves out, too; products of chosen experts alone.
"""

import torch
from torch import Tensor, nn

from tilewright import ops
from tilewright.nn.filling import parameter, uniform
from tilewright.nn.linear import Linear
from tilewright.nn.moe import Routing

__all__ = ["ClampedMoE"]

PIECE_TOKENS = 256
"""Every expert's activations exist for so many tokens at a time: 128 experts of 2 x 2880 in bfloat16 are then 0.4 GB."""


class _Router(nn.Module):
    def __init__(self, routing: Routing, features: int, place: dict):
        super().__init__()
        self.routing = routing
        self.weight = parameter(routing.experts, features, fill=uniform(features), **place)
        self.logit_bias = parameter(routing.experts, fill=nn.init.zeros_, **place)

    def forward(self, x_TE: Tensor) -> tuple[Tensor, Tensor]:
        """[T, E] -> (weights [T, K] float32, experts [T, K])."""
        logits = ops.linear(x_TE.float(), self.weight.float(), self.logit_bias.float())
        return self.routing.choose(logits, None)


class _Projection(nn.Module):
    """One projection of all experts: weight [X R, C], bias [X R]; `parts` are those of each expert."""

    def __init__(self, experts: int, parts: tuple[int, ...], in_features: int, place: dict):
        super().__init__()
        self.experts, self.parts = experts, parts * experts
        rows = sum(self.parts)
        self.weight = parameter(rows, in_features, fill=uniform(in_features), **place)
        self.bias = parameter(rows, fill=nn.init.zeros_, **place)

    def forward(self, x: Tensor) -> Tensor:
        """[1 or X, T, C] -> [X, T, R]."""
        y = ops.matmul(x, self.weight.unflatten(0, (self.experts, -1)).mT)
        return y + self.bias.unflatten(0, (self.experts, -1))[:, None]


class ClampedMoE(nn.Module):
    """Routed experts with biases and a clamped gate.

    Args:
        features: E, in and out.
        inner: I, width of an expert.
        routing: how experts are chosen; the router has a bias besides.
        alpha: of the gate's sigmoid.
        limit: what gate and up are clamped to.
    """

    def __init__(
        self,
        features: int,
        inner: int,
        *,
        routing: Routing,
        alpha: float,
        limit: float,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        place = {"device": device, "dtype": dtype}
        self.alpha, self.limit = alpha, limit
        self.router = _Router(routing, features, place)
        self.experts_gate_up = _Projection(routing.experts, (inner, inner), features, place)
        self.experts_down = _Projection(routing.experts, (features,), inner, place)

    @property
    def reader(self) -> Linear | None:
        """The one layer that reads the input: there are several."""
        return None

    def forward(self, x_TE: Tensor) -> Tensor:
        """[T, E] -> [T, E]."""
        if x_TE.shape[0] <= PIECE_TOKENS:
            return self._piece(x_TE)
        return torch.cat([self._piece(piece) for piece in x_TE.split(PIECE_TOKENS)])

    def _piece(self, x_TE: Tensor) -> Tensor:
        weights, experts = self.router(x_TE)
        gate, up = self.experts_gate_up(x_TE[None]).chunk(2, -1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        y_XTE = self.experts_down((up + 1) * gate * torch.sigmoid(self.alpha * gate))
        # What a token did not choose has the weight 0: one product of the same bits in any batch.
        of_all = weights.new_zeros(x_TE.shape[0], y_XTE.shape[0]).scatter(1, experts, weights)
        return (y_XTE.float() * of_all.T[..., None]).sum(0).to(x_TE.dtype)

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}, limit={self.limit}"
