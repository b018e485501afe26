"""The mixture of experts of gpt-oss (OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025): biases and a clamped gate.

    # T tokens, E features, X experts, K experts per token, I width of an expert
    weights = softmax of the K largest of router(x);   y = sum of w_i (down_i(act(gate_i(x), up_i(x))))
    act(g, u) = (u' + 1) g' sigmoid(alpha g'),   g' = min(g, limit),   u' = u clamped to [-limit, limit]

It uses the operators of nn.MoE: each expert multiplies its own tokens, and sums over a token's experts are float32. With the
constants of gpt-oss the activation is in the product's epilogue; with others it is separate, in plain torch.
Not supported: what nn.MoE does not support.
"""

import torch
from torch import Tensor, nn

from tilewright import ops
from tilewright.nn.expert_linear import ExpertLinear
from tilewright.nn.filling import parameter, uniform
from tilewright.nn.linear import Linear
from tilewright.nn.moe import Routing

__all__ = ["ClampedMoE"]

_FUSED = (1.702, 7.0)
"""(alpha, limit) for which the grouped product has the epilogue clamped_silu_mul."""


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


class ClampedMoE(nn.Module):
    """Routed experts with biases and a clamped gate.

    Args:
        features: E, of input and output.
        inner: I, width of an expert.
        routing: how experts are chosen; the router also has a bias.
        alpha: factor inside the gate's sigmoid.
        limit: gate values are clamped to at most this, up values to [-limit, limit].
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
        self.alpha, self.limit = alpha, limit
        self.router = _Router(routing, features, {"device": device, "dtype": dtype})
        self.experts_gate_up = ExpertLinear(routing.experts, (inner, inner), features, bias=True, device=device, dtype=dtype)
        self.experts_down = ExpertLinear(routing.experts, (features,), inner, bias=True, device=device, dtype=dtype)

    @property
    def reader(self) -> Linear | None:
        """None, because several layers read the input."""
        return None

    def forward(self, x_TE: Tensor, adapters: Tensor | None = None) -> Tensor:
        """[T, E] -> [T, E]; `adapters` is ignored, because no layer here has an adapter."""
        weights, experts = self.router(x_TE)
        order = ops.sort_by_expert(experts, self.experts_down.experts)
        if (self.alpha, self.limit) == _FUSED:
            inner = self.experts_gate_up(x_TE, order, "clamped_silu_mul", gather=True)
        else:
            gate, up = self.experts_gate_up(x_TE, order, gather=True).chunk(2, -1)
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
            inner = (up + 1) * gate * torch.sigmoid(self.alpha * gate)
        return ops.combine_tokens(self.experts_down(inner, order), order, weights)

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}, limit={self.limit}"
