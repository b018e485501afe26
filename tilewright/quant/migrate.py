"""Moving outliers of activations into weights (SmoothQuant, Xiao et al., 2022).

Column j of a layer's input is divided by s_j, and column j of its weight is multiplied by it. The product stays the same, and
the largest activation of a token, which sets its scale, becomes smaller.

    s_j = amax |x_j| ^ strength / amax |w_j| ^ (1 - strength)

The division costs nothing if the layer's input comes directly from a norm, because the norm's weight can absorb it. A module
lists such pairs with `norm_pairs()` -> [(norm, linear layer)]; in `models.decoder.Block` they are the inputs of attention and
feed-forward layer. Other layers are not changed, and the report states this.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tilewright.quant.calibrate import Seen

__all__ = ["migrate_into_norms"]


def migrate_into_norms(
    model: nn.Module, layers: Mapping[str, nn.Module], seen: Mapping[str, Seen], strength: float
) -> dict[str, str]:
    """Change the weight, norm and recorded input of every layer after a norm. Returns name -> a note for the report."""
    norms = {id(layer): norm for module in model.modules() for norm, layer in getattr(module, "norm_pairs", tuple)()}
    notes = {}
    for name, layer in layers.items():
        norm, found = norms.get(id(layer)), seen[name]
        if norm is None:
            notes[name] = "nothing migrated, because there is no norm before it"
        elif found.amax is None:
            notes[name] = "nothing migrated, because the calibration input did not reach it"
        else:
            low, high = _move(norm, layer, found, strength)
            notes[name] = f"migrated into the norm, factors {low:.2g} to {high:.2g}"
    return notes


def _move(norm: nn.Module, layer: nn.Module, found: Seen, strength: float) -> tuple[float, float]:
    weight: Tensor = layer.weight.data  # pyright: ignore[reportAssignmentType]
    gain: Tensor = norm.weight.data  # pyright: ignore[reportAssignmentType]
    assert found.amax is not None
    assert found.low is not None
    assert found.high is not None
    largest_x = found.amax.to(weight.device).clamp_min(1e-5)
    largest_w = weight.abs().amax(0).float().clamp_min(1e-5)
    # Factors are powers of two, so that multiplying by them rounds neither the weight of the norm nor that of the layer.
    factors = torch.exp2((largest_x.log2() * strength - largest_w.log2() * (1 - strength)).round())
    weight.mul_(factors.to(weight.dtype))
    gain.div_(factors.to(gain.dtype))
    if isinstance(bias := getattr(norm, "bias", None), Tensor):
        bias.data.div_(factors.to(bias.dtype))
    found.rows = [rows / factors.to(rows) for rows in found.rows]
    found.low, found.high = found.low / factors.cpu(), found.high / factors.cpu()
    return factors.min().item(), factors.max().item()
