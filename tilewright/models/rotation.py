"""Reads the settings of rotary positions from config.json, with the keys of transformers 5 (`rope_parameters`) and 4
(`rope_scaling`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilewright.models.errors import ModelError

__all__ = ["PARTIAL", "Rotation"]

PARTIAL = (
    "GPTNeoXForCausalLM", "Glm4ForCausalLM", "Glm4MoeForCausalLM", "GlmForCausalLM", "NemotronForCausalLM", "Phi3ForCausalLM",
    "PhiForCausalLM", "StableLmForCausalLM",
)  # fmt: skip
"""Architectures that may rotate the first dimensions of a head only."""
_BY_KIND = ("Gemma3ForCausalLM", "Olmo3ForCausalLM")
"""Architectures whose layers with a window may have other wavelengths."""
_BY_LAYER = ("full_attention", "sliding_attention")
_WITH_CONTEXT = ("dynamic", "llama3", "longrope", "yarn")


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """The wavelengths of one kind of layer: "rope_type" and its numbers, None for the plain ones."""

    theta: float
    scaling: Mapping[str, Any] | None
    partial: float = 1.0
    """The share of a head's dimensions that turns."""

    @classmethod
    def from_hf(cls, architecture: str, raw: Mapping[str, Any]) -> "tuple[Rotation, Rotation | None]":
        """(of all layers, of those with a window where they differ). Raises ModelError."""
        given: Mapping[str, Any] = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
        base = raw.get("rope_theta")
        if not any(isinstance(value, Mapping) for value in given.values()):
            local = raw.get("rope_local_base_freq")
            return _one(architecture, raw, given, base), None if local is None else _one(architecture, raw, {}, local)
        if architecture not in _BY_KIND or set(given) - {*_BY_LAYER}:
            raise ModelError(f"rope parameters that differ by layer type ({', '.join(given)}) are not supported")
        full, local = (given.get(kind) or {} for kind in _BY_LAYER)
        return _one(architecture, raw, full, base), _one(architecture, raw, local, raw.get("rope_local_base_freq"))


def _one(architecture: str, raw: Mapping[str, Any], given: Mapping[str, Any], base: float | None) -> Rotation:
    """`given` may hold theta and the share, too (transformers 5)."""
    numbers = {**given}
    theta = float(numbers.pop("rope_theta", None) or base or 10000.0)  # neither may be 0
    kind = numbers.pop("rope_type", None) or numbers.get("type") or "default"
    numbers.pop("type", None)
    partial = numbers.pop("partial_rotary_factor", None) or raw.get("partial_rotary_factor") or 1.0
    if (partial != 1.0 and architecture not in PARTIAL) or not 0 < partial <= 1:
        wanted = "above 0 and at most 1" if architecture in PARTIAL else "1 (whole heads are rotated)"
        raise ModelError(f"partial_rotary_factor must be {wanted}, got {partial}")
    if architecture == "Phi3ForCausalLM" and kind in ("su", "yarn"):
        kind = "longrope"  # its names before it had one
    if architecture == "HunYuanDenseV1ForCausalLM" and kind == "dynamic" and numbers.get("alpha"):
        # A longer base, and nothing that depends on the text's length.
        heads = raw.get("num_attention_heads") or 1
        dim = raw.get("head_dim") or (raw.get("hidden_size") or heads) // heads
        if dim < 3:
            raise ModelError(f"head_dim must be at least 3 for a rotation with alpha, got {dim}")
        theta, kind = theta * float(numbers["alpha"]) ** (dim / (dim - 2)), "default"
    if kind == "default":
        return Rotation(theta=theta, scaling=None, partial=partial)
    scaling = {key: value for key, value in numbers.items() if value is not None}
    if kind in _WITH_CONTEXT:
        longest = raw.get("max_position_embeddings") or 0
        trained = scaling.get("original_max_position_embeddings") or longest
        # Phi-3 has it beside the other sizes, and there it counts.
        trained = raw.get("original_max_position_embeddings") or trained
        scaling["original_max_position_embeddings"] = longest if kind == "dynamic" else trained
        if kind in ("longrope", "yarn") and trained:
            scaling.setdefault("factor", longest / trained)
    return Rotation(theta=theta, scaling={"rope_type": kind, **scaling}, partial=partial)
