"""Checks that an optimised model computes the same outputs as the float model. If it does not, finds the faulty layer.

    check = verify(float_graph, fused_graph, inputs, want, precision="fp16")

The outputs are compared with those of the model as the user calls it (differences.py). The table TOLERANCES limits the error.
If an output exceeds the limit, torch's own model in the same precision is measured too, and twice its error is allowed, up to
CEILING. A tolerance given by the user replaces the table: it is the allowed RMS error, and the allowed share of different
integers.

A larger error raises `Inaccurate`. The message names the first layer whose own error is too large (layer_errors.py). It also
states whether torch's own layer has that error too. If so, the precision is too narrow for the model; otherwise one of our
implementations is wrong.

An output is ignored if float32 rounding errors alone would change it completely.

Not here: whether two models are equally good at a task.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from tilewright.fuse.differences import CEILING, LARGEST_OVER_RMS, TOLERANCES, Difference, Tolerance, compare_outputs
from tilewright.fuse.layer_errors import ANCHOR_NODE, FLOAT_NODE, LayerError, layer_errors
from tilewright.fuse.structure import flatten, rebuild
from tilewright.hw.tf32 import exact_float32

__all__ = [
    "ANCHOR_NODE",
    "FLOAT_NODE",
    "NOISE_WORDS",
    "TOLERANCES",
    "Check",
    "Difference",
    "Inaccurate",
    "LayerError",
    "Tolerance",
    "above_noise",
    "beside",
    "compare_outputs",
    "layer_errors",
    "verify",
]

_HALF_ULP = 2.0**-24
"""Relative size of a float32 rounding error."""
NOISE_WORDS = "noise in the float model"
"""Text for an output that rounding errors alone would change."""
_BUG = "tilewright's implementation"
"""Text that names the cause of a layer's error, if torch's own layer does not have it."""
_OURS = 4.0
"""If an error is this many times the error of torch's own layer, it is not rounding, but a fault of the implementation."""


@dataclass(frozen=True)
class Check:
    """The result of `verify`."""

    precision: str
    tolerance: Tolerance
    outputs: tuple[Difference, ...]
    layers: tuple[LayerError, ...] = ()
    """The error of each layer; measured only if an output is out of tolerance."""
    native: tuple[Difference, ...] = ()
    """Errors of torch's own model in this precision; measured only if an output exceeds the limits of the table."""
    torchs: dict[str, float] = field(default_factory=dict)
    """Node of the float graph -> the error of torch's own layer in this precision. Filled together with `layers`."""
    faults: tuple[LayerError, ...] = ()
    """Layers that are wrong even in float32, and that removing their fusions did not correct."""

    @property
    def failed(self) -> tuple[Difference, ...]:
        """The outputs that are out of tolerance."""
        return tuple(d for d in self.outputs if not self.tolerance.allows(d))

    @property
    def worst(self) -> Difference:
        """The output with the largest error."""
        return max(self.outputs, key=lambda d: (d.rms, d.largest))

    @property
    def guilty(self) -> LayerError | None:
        """The first layer whose own error exceeds the tolerance; if there is none, the layer with the largest own error."""
        over = (layer for layer in self.layers if not layer.own <= self.tolerance.rms)
        return next(over, max(self.layers, key=lambda layer: layer.own, default=None))

    def to_json(self) -> dict[str, Any]:
        """As values for JSON. Numbers that are not finite become text."""
        return {
            "precision": self.precision,
            "tolerance": self.tolerance._asdict(),
            "outputs": [_plain(asdict(d)) for d in self.outputs],
            "layers": [_plain(asdict(layer)) for layer in self.layers],
            "native": [_plain(asdict(d)) for d in self.native],
        }

    def __str__(self) -> str:
        if not self.outputs:
            return "there is no output to compare"
        each = "output{0.name}: RMS error {0.rms:.2e}, largest {0.largest:.2e}{1}"
        lines = [each.format(d, f" ({d.words})" if d.words else "") for d in self.outputs]
        limit = f"allowed: {_limits(self)}"
        limit += "; torch's own model was measured too, and up to twice its error is allowed" if self.native else ""
        return "\n".join([*lines, limit])


class Inaccurate(ValueError):
    """The outputs of an optimised model differ too much from those of the float model; `check` contains the numbers."""

    def __init__(self, check: Check):
        self.check = check
        off = check.failed[0]
        words = off.words or f"relative RMS error {off.rms:.2e}, largest {off.largest:.2e}"
        text = (
            f"output{off.name} of the optimised model is too far from the float model's: {words}; wanted at most "
            f"{_limits(check, off.discrete)}. {_blame(check)} {_advice(check)}"
        )
        super().__init__(text)


def _limits(check: Check, discrete: bool = False) -> str:
    allowed = check.tolerance
    if discrete:
        return f"{allowed.apart:.2%} of the values in {check.precision}"
    return f"RMS {allowed.rms:.2e} and largest {allowed.largest:.2e} in {check.precision}"


def _blame(check: Check) -> str:
    guilty = check.faults[0] if check.faults else check.guilty
    if guilty is None:
        return "The layer at fault is unknown: no call of the optimised graph can be compared with the float model."
    where = guilty.layer + (f" ({guilty.line})" if guilty.line else "")
    words = guilty.words or f"its own error is {guilty.own:.2e}"
    if check.faults:
        return f"The guilty layer is {where}: {words} in float32 too, which is a bug in tilewright's fusion; please report it."
    if not guilty.own <= check.tolerance.rms:
        return f"The guilty layer is {where}: {words}{_beside_torch(check, guilty)}."
    return (
        f"No single layer is guilty: the errors of {len(check.layers)} layers add up; the largest is that of {where} ({words})."
    )


def _beside_torch(check: Check, guilty: LayerError) -> str:
    torchs = check.torchs.get(guilty.computes)
    if torchs is None:
        return ""
    if guilty.own <= _OURS * torchs or guilty.own == torchs:
        return f", and torch's own layer has an error of this size in {check.precision} too"
    return f", but torch's own layer has {torchs:.2e} in {check.precision}: this is a bug in {_BUG}; please report it"


def _advice(check: Check) -> str:
    """What the user can do about it."""
    off, dtype = check.failed[0], "fp16" if check.precision == "int8" else check.precision
    for d in check.native:
        if d.name == off.name and (d.rms >= off.rms / _OURS or not math.isfinite(d.rms)):
            lost = d.words or f"relative RMS error {d.rms:.2e}"
            return (
                f"torch's own model in {dtype} gets this output wrong as well ({lost}): {dtype} is too narrow for the model. "
                "Use precision='fp32', or set tolerance=... to accept the error"
            )
    if check.faults or dtype == "fp32" or _BUG in _blame(check):
        return "Set tolerance=... to accept the error"
    return "Use a wider precision, or set tolerance=... to accept the error"


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


def verify(
    float_graph: fx.GraphModule, fused: fx.GraphModule, inputs: Sequence[Any], want: Any = None, *,
    precision: str, tolerance: float | None = None, run: Callable[..., Any] | None = None,
    native: fx.GraphModule | Callable[..., Any] | None = None,
) -> Check:  # fmt: skip
    """Compare an optimised model with the float model on the same inputs.

    With a deep model, the error of any implementation may exceed `TOLERANCES`. If torch's own model exceeds it too, twice the
    error of torch's model is allowed, up to `CEILING`.

    Args:
        float_graph: the float model as a graph.
        fused: the optimised model as a graph, used to find the faulty layer.
        inputs: flat arguments of both.
        want: the reference outputs; None: those of the float graph.
        precision: a key of `TOLERANCES`.
        tolerance: replaces `TOLERANCES`: the allowed relative RMS error. The largest error may be 16 times as large, and this
            share of an output's integers may differ.
        run: the function that computes the optimised outputs (compiled, captured); default: `fused` itself.
        native: torch's own model in the precision. It accepts the same inputs, and its result has the structure of `want`. It
            is called only if needed.

    Returns:
        The comparison. All its outputs are within tolerance.

    Raises:
        Inaccurate: an output is out of tolerance.
        ValueError: the precision is unknown and there is no tolerance; the tolerance is not a number of at least 0; or the
            float model draws random numbers.
    """
    allowed = allowed_of(precision, tolerance)
    with torch.no_grad(), exact_float32():
        right = float_graph(*inputs)
    want = right if want is None else want
    with torch.no_grad():
        got = (fused if run is None else run)(*inputs)
    check = Check(precision, allowed, compare_outputs(want, got))
    if not check.failed:
        return check
    with torch.no_grad(), exact_float32():
        again = Check(precision, allowed, compare_outputs(right, float_graph(*inputs)))
    if again.failed:
        raise ValueError(RANDOM)
    if native is not None and tolerance is None:
        with torch.no_grad():
            check = beside(check, compare_outputs(want, native(*inputs)))
    if check.failed and tolerance is None:
        check = above_noise(check, want, lambda: _jittered(float_graph, inputs, want))
    if check.failed:
        layers = tuple(layer_errors(float_graph, fused, inputs))
        raise Inaccurate(replace(check, layers=layers))
    return check


def _jittered(float_graph: fx.GraphModule, inputs: Sequence[Any], want: Any) -> Any:
    """The float model's outputs if each intermediate value is changed by half an ulp of float32, up or down at random."""
    with torch.no_grad(), exact_float32():
        found = list(_Jitter(float_graph).run(*inputs, enable_io_processing=False))
    tensors, structure = flatten(want)
    return rebuild(structure, found) if len(found) == len(tensors) else want


class _Jitter(fx.Interpreter):
    """Runs a graph in float32 and adds a rounding error to each value."""

    def __init__(self, graph: fx.GraphModule):
        super().__init__(graph)
        self.random = torch.Generator().manual_seed(0)

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op != "call_function" or not isinstance(value, Tensor) or value.dtype != torch.float32:
            return value
        sign = torch.randint(2, value.shape, generator=self.random).to(value.device) * 2 - 1
        return value * (1 + sign * _HALF_ULP)


def above_noise(check: Check, want: Any, jittered: Callable[[], Any]) -> Check:
    """`check`, with the errors of noisy outputs set to 0.

    An output is noisy if float32 rounding errors alone change it by at least a tenth of its RMS, and by at least half of the
    observed error. Such an output is a difference of nearly equal values, like `x - x`. No precision preserves it, so its error
    does not show whether an implementation is right.
    """
    moved = {d.name: d for d in compare_outputs(want, jittered())}
    outputs = (
        replace(d, rms=0.0, largest=0.0, words=NOISE_WORDS) if _is_noise(d, moved.get(d.name)) else d for d in check.outputs
    )
    return replace(check, outputs=tuple(outputs))


def _is_noise(off: Difference, moved: Difference | None) -> bool:
    if moved is None or off.discrete or not math.isfinite(off.rms + off.largest):
        return False
    return moved.rms >= CEILING and off.rms <= 2 * moved.rms and off.largest <= 2 * moved.largest


RANDOM = (
    "the float model gives other outputs in every call, so its outputs cannot be compared: it draws random numbers from a "
    "generator of its own, or reads something outside itself (a clock, a global variable). Remove this from the model, or "
    "optimise only a submodule that does not do it"
)


def allowed_of(precision: str, tolerance: float | None) -> Tolerance:
    """The tolerance for outputs. Raises ValueError for an unknown precision or an invalid tolerance."""
    if tolerance is not None and not 0.0 <= tolerance < math.inf:
        raise ValueError(f"tolerance is {tolerance}; wanted a finite number of at least 0, or None")
    if tolerance is None and precision not in TOLERANCES:
        raise ValueError(f"precision is {precision!r}; wanted one of {', '.join(TOLERANCES)}, or a tolerance")
    return TOLERANCES[precision] if tolerance is None else Tolerance.given(tolerance)


def beside(check: Check, native: tuple[Difference, ...]) -> Check:
    """`check` with a tolerance of twice the error of torch's own model, if this is more than the table allows.

    The RMS error that is allowed in this way is at most `CEILING`.
    """
    rms, largest = (max((getattr(d, name) for d in native if not d.discrete), default=0.0) for name in ("rms", "largest"))
    apart = max((d.rms for d in native if d.discrete), default=0.0)
    check = replace(check, native=native)
    if not math.isfinite(rms + largest + apart):
        return check
    table = check.tolerance
    most = (CEILING, CEILING * LARGEST_OVER_RMS, CEILING)
    found = (min(2 * own, limit) for own, limit in zip((rms, largest, apart), most, strict=True))
    return replace(check, tolerance=Tolerance(*(max(a, b) for a, b in zip(table, found, strict=True))))
