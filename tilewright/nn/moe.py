"""A mixture of experts as DeepSeek has it: some experts see every token, the router sends it to a few of the rest.

    # T tokens, E features, X routed experts, K of them a token, I width of an expert
    y = shared(x) + sum of w_i expert_i(x) over the K chosen experts i

By plain products: where tokens are few every expert multiplies all of them (its weight is read anyway, and nothing waits for
the device), else tokens are sorted by expert for `torch.nn.functional.grouped_mm`. Sums over experts are float32.

Not here: dropped tokens, a balancing loss, quantised experts, expert parallelism, a fused kernel.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tilewright import ops
from tilewright.nn.ffn import GatedMLP
from tilewright.nn.filling import parameter, uniform
from tilewright.nn.linear import Linear
from tilewright.op import scope

__all__ = ["DENSE_TOKENS", "METHODS", "MoE", "Routing"]

METHODS = ("greedy", "group_limited_greedy", "noaux_tc")
DENSE_TOKENS = 256
"""Up to as many every expert multiplies all tokens: as many as a captured decode step has."""


@dataclass(frozen=True, kw_only=True)
class Routing:
    """How a token's experts are chosen.

    method: "greedy" (the largest of a softmax), "group_limited_greedy" (of the groups with the largest maximum; DeepSeek-V2),
        or "noaux_tc" (sigmoids, groups by the sum of their two best with a bias that only the choice sees; DeepSeek-V3).
    experts: X, routed.
    chosen: K.
    groups: X is divided into; 1 for "greedy".
    chosen_groups: whose experts may be chosen.
    normalise: whether the K weights are divided by their sum.
    scale: factor on the weights.
    """

    method: str
    experts: int
    chosen: int
    groups: int = 1
    chosen_groups: int = 1
    normalise: bool = False
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"routing method {self.method!r} is not supported; supported: {', '.join(METHODS)}")
        if self.experts % self.groups or not 1 <= self.chosen_groups <= self.groups:
            raise ValueError(
                f"routing: {self.experts} experts in {self.groups} groups, {self.chosen_groups} of them chosen: groups must "
                "divide the experts, and at least one and at most all be chosen"
            )
        per = self.experts // self.groups
        if not 1 <= self.chosen <= self.chosen_groups * per:
            raise ValueError(f"routing: {self.chosen} experts of {self.chosen_groups} groups of {per} cannot be chosen")
        if self.method == "noaux_tc" and per < 2:
            raise ValueError("routing: noaux_tc takes the two best of each group, so groups need two experts at least")

    def choose(self, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Logits [T, X] float32, bias [X] for "noaux_tc" -> (weights [T, K] float32, experts [T, K] int64)."""
        scores = logits.softmax(-1) if bias is None else logits.sigmoid()
        ranked = scores if bias is None else scores + bias
        if self.method != "greedy":
            grouped = ranked.unflatten(1, (self.groups, -1))
            best = grouped.amax(-1) if bias is None else grouped.topk(2, -1).values.sum(-1)
            allowed = torch.zeros_like(best, dtype=torch.bool).scatter(1, best.topk(self.chosen_groups, -1).indices, True)
            hidden = 0.0 if bias is None else float("-inf")
            ranked = torch.where(allowed[..., None], grouped, hidden).flatten(1)
        experts = ranked.topk(self.chosen, -1).indices
        weights = scores.gather(1, experts)
        if self.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.scale, experts


class _Router(nn.Module):
    """The logits' weight [X, E] in the model's dtype, and for "noaux_tc" the bias [X], float32."""

    def __init__(self, routing: Routing, features: int, device: torch.device | str | None, dtype: torch.dtype | None):
        super().__init__()
        self.routing = routing
        self.weight = parameter(routing.experts, features, fill=uniform(features), device=device, dtype=dtype)
        self.bias = None
        if routing.method == "noaux_tc":
            self.bias = parameter(routing.experts, fill=nn.init.zeros_, device=device, dtype=torch.float32)

    def forward(self, x_TE: Tensor) -> tuple[Tensor, Tensor]:
        """[T, E] -> (weights [T, K] float32, experts [T, K])."""
        return self.routing.choose(ops.linear(x_TE.float(), self.weight.float()), self.bias)


class _Stacked(nn.Module):
    """One projection of all experts, above each other: weight [X * rows, in]. `parts` are what a checkpoint has apart."""

    def __init__(
        self,
        experts: int,
        parts: tuple[int, ...],
        in_features: int,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ):
        super().__init__()
        self.experts, self.parts = experts, parts * experts
        self.weight = parameter(sum(self.parts), in_features, fill=uniform(in_features), device=device, dtype=dtype)

    def by_expert(self) -> Tensor:
        """[X, in, rows], a view."""
        return self.weight.unflatten(0, (self.experts, -1)).mT


class MoE(nn.Module):
    """Shared and routed gated feed-forward layers.

    Args:
        features: E, in and out.
        inner: I, width of a routed expert.
        shared: width of the experts that see every token, together.
        routing: how the others are chosen.
        activation: "silu_mul" or "gelu_mul".
    """

    def __init__(
        self,
        features: int,
        inner: int,
        *,
        shared: int,
        routing: Routing,
        activation: str = "silu_mul",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.activation = activation
        self.router = _Router(routing, features, device, dtype)
        self.shared = GatedMLP(features, shared, activation=activation, device=device, dtype=dtype)
        self.experts_gate_up = _Stacked(routing.experts, (inner, inner), features, device, dtype)
        self.experts_down = _Stacked(routing.experts, (features,), inner, device, dtype)

    @property
    def reader(self) -> Linear | None:
        """The one layer that reads the input: there are several."""
        return None

    def forward(self, x_TE: Tensor, adapters: Tensor | None = None) -> Tensor:
        """[T, E] -> [T, E]; adapters as in `Batch`, of the shared experts."""
        weights, experts = self.router(x_TE)
        # grouped_mm is quick in bfloat16 alone; and whether its rows depend on the batch nobody promises.
        few = x_TE.shape[0] <= DENSE_TOKENS or x_TE.dtype != torch.bfloat16 or scope().invariant
        routed = self._by_all(x_TE, weights, experts) if few else self._grouped(x_TE, weights, experts)
        return self.shared(x_TE, adapters) + routed.to(x_TE.dtype)

    def _by_all(self, x_TE: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        inner = ops.matmul(x_TE[None], self.experts_gate_up.by_expert(), activation=self.activation)
        y_XTE = ops.matmul(inner, self.experts_down.by_expert())
        tokens = torch.arange(x_TE.shape[0], device=x_TE.device)
        return _weighted(y_XTE[experts, tokens[:, None]], weights)

    def _grouped(self, x_TE: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        count = torch.arange(self.experts_down.experts, device=x_TE.device)
        by_expert, order = experts.flatten().sort(stable=True)
        ends = torch.searchsorted(by_expert, count, right=True).to(torch.int32)
        both = F.grouped_mm(x_TE[order // experts.shape[1]], self.experts_gate_up.by_expert(), offs=ends)
        gate, up = both.chunk(2, 1)
        inner = ops.silu_mul(gate, up) if self.activation == "silu_mul" else ops.gelu_mul(gate, up)
        out = F.grouped_mm(inner, self.experts_down.by_expert(), offs=ends)
        back = torch.empty_like(out).index_copy_(0, order, out)
        return _weighted(back.unflatten(0, experts.shape), weights)


def _weighted(y_TKE: Tensor, weights: Tensor) -> Tensor:
    """Sum over K of w y, float32, one after the other: the same bits in any batch and any run."""
    total = y_TKE[:, 0].float() * weights[:, :1]
    for k in range(1, weights.shape[1]):
        total = total + y_TKE[:, k].float() * weights[:, k : k + 1]
    return total
