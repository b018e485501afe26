"""The sizes of a mixture of experts, as part of a model's config."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilewright.models.errors import ModelError
from tilewright.nn import Routing

__all__ = ["Experts", "check_count", "positive", "routing"]

MAX_EXPERTS = 1 << 16
"""Most experts in all layers together; each has three tensors. The largest published models have some 24 thousand."""


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Sizes of `nn.MoE`, for every layer from `first_layer` on except `dense_layers`.

    inner: width of a routed expert. shared: total width of the experts that see every token; 0: none. shared_gate: whether
    their output has a factor for each token.
    clamped: alpha and limit of gpt-oss's gate, and biases; None: the usual gated layer.
    """

    first_layer: int
    inner: int
    shared: int
    routing: Routing
    dense_layers: tuple[int, ...] = ()
    clamped: tuple[float, float] | None = None
    shared_gate: bool = False

    def in_layer(self, layer: int) -> bool:
        """Whether that layer is a mixture."""
        return layer >= self.first_layer and layer not in self.dense_layers


def positive(raw: Mapping[str, Any], key: str) -> int:
    """A positive number from config.json. Raises ModelError."""
    value = raw.get(key)
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json: {key} must be a positive integer, got {value}")
    return value


def routing(**options: Any) -> Routing:
    """Like `Routing`, but raises ModelError."""
    try:
        return Routing(**options)
    except ValueError as error:
        raise ModelError(f"config.json requires a mixture of experts that is not supported: {error}") from error


def check_count(experts: int, layers: int) -> None:
    """Raise ModelError for an implausible number of experts."""
    if experts * layers > MAX_EXPERTS:
        raise ModelError(
            f"config.json has {experts} experts in {layers} layers, but at most {MAX_EXPERTS} in total are supported"
        )
