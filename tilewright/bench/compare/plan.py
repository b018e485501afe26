"""Decides which variants to build, and in which order: each time the one that reduces the layers' expected errors most.

An engine may take a minute to build a program, so the most informative variants come first. Expected errors follow from a guess
of each layer's time (operations and bytes over round numbers for the machine, since only ratios matter), a relative error of
every variant's time, and weak priors for the unknowns; each variant is a rank-one update of their covariance. Pieces cut out of
the model count as less exact than prefixes, because their inputs are not computed just before. This does not apply if the host
or the device is timed alone (ballast.py): a piece then takes as long as in the model, and a single layer is most informative.

Nothing runs here except the model once, for tracing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from tilewright.bench.compare.attribution import FIRST, Border, Design, columns
from tilewright.bench.compare.layers import Chain, trace
from tilewright.bench.compare.specs import Edit
from tilewright.bench.compare.variants import Variant, candidates

__all__ = ["Plan", "design_of", "guesses", "only_needed", "plan", "plan_of", "refined"]

Floats = NDArray[np.float64]

# Round numbers for a guess: operations and bytes a second, seconds of a launch. And what a byte and a tensor may cost that goes
# into a program or out of it: copied, cast, laid out anew (H100, captured ResNet-50s, by fits: 7 to 17 us a tensor in, 0 to 6
# out).
_MACHINES = {
    "cuda": (3e14, 2e12, 3e-6, Border(1e-12, 1e-12, 2e-5, 2e-5)),
    "cpu": (5e10, 1e10, 3e-6, Border(1e-9, 1e-9, 1e-5, 1e-5)),
}
_ERROR = 0.01  # relative, of a variant's time: noise after some tens of rounds, and what additivity does not hold
_SEEN_ERROR = 0.1  # relative, of the first few calls of a variant
_PIECE_ERROR = 0.03  # of one that does not begin where the model begins
_MOST_PER_UNKNOWN = 2.0
_SPARE = 0.15  # of the needed variants: degrees of freedom to test additivity with


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Variants in the order in which they are worth building."""

    chain: Chain
    variants: list[Variant]
    needed: list[Variant]
    """The first of the `variants`: enough to tell every layer apart, and some more."""
    design: Design
    """The design of all variants."""
    rest: list[Variant]
    """Variants beyond the budget, best first."""
    silent: frozenset[str] = frozenset()
    """Variants that say nothing of layers; of these only "whole" is in `variants`."""
    alike: bool = False
    """Whether a piece cut out of the model is as exact as a program that begins where the model begins."""

    def more(self, count: int) -> list[Variant]:
        """The next best `count` variants; `design` has them already."""
        return self.rest[:count]


def design_of(chain: Chain, found: list[Variant]) -> Design:
    """The design matrix's data, without any torch in it."""
    return Design(
        layers=tuple(layer.name for layer in chain.layers),
        groups=chain.groups,
        flops=tuple(layer.flops for layer in chain.layers),
        bytes=tuple(layer.bytes for layer in chain.layers),
        parts={v.name: v.part for v in found},
        border={v.name: v.border for v in found},
        dear=_machine(chain)[3],
    )


def plan(model: nn.Module, inputs: tuple[Tensor, ...], budget: int | None = None, *, whole: bool = False) -> Plan:
    """At most `budget` variants of `model` (None: as many as twice the unknowns), "whole" first.

    With fewer than `needed` variants some layers cannot be told apart; `attribute` then joins them. `whole`: if a model cannot
    be cut, the plan is the whole model only. Raises Untraceable: see layers.py.
    """
    if budget is not None and budget < 1:
        raise ValueError(f"budget is {budget} variants, wanted at least 1 (the whole model)")
    return plan_of(trace(model, inputs, whole=whole), budget)


def plan_of(
    chain: Chain, budget: int | None = None, ballast: Edit | None = None, near: Sequence[Edit] = (),
    silent: frozenset[str] = frozenset(), *, alike: bool = False,
) -> Plan:  # fmt: skip
    """The same of a model that was traced, also of programs with `ballast`, or one of `near` (ballast.py), without those that
    are `silent`. `alike`: of `Plan`."""
    found = candidates(chain, ballast, near)
    design = design_of(chain, found)
    guess = guesses(chain)
    layers = np.zeros(max(design.groups) + 1)
    layers[list(design.groups)] = guess
    giving = [k for k, v in enumerate(found) if v.spec.giving and all(edit.times for edit in v.spec.edits)]
    begin = [*giving, *(_pieces(found, design) if alike else [*_alone(found, guess), *_halves(found, len(chain.layers))])]
    begin = [0, *(k for k in begin if found[k].name not in silent)]
    costs = np.zeros(FIRST)
    costs[0] = 0.1 * guess.sum() + 2e-5
    piece = _ERROR if alike else _PIECE_ERROR
    order = _ordered(design, found, silent, begin, np.concatenate([costs, layers]), piece)
    ranked = [found[k] for k in order]
    known = int(_known(columns(design, [v.name for v in found if v.name not in silent], [])).sum())
    needed = _needed(design, [v.name for v in ranked], silent, known)
    unknowns = FIRST + len(set(chain.groups))
    most = budget if budget is not None else max(needed, round(_MOST_PER_UNKNOWN * unknowns))
    chosen = ranked[:most]
    rest = ranked[most:]
    return Plan(chain=chain, variants=chosen, needed=chosen[:needed], design=design, rest=rest, silent=silent, alike=alike)


def _machine(chain: Chain) -> tuple[float, float, float, Border]:
    return _MACHINES["cuda" if chain.inputs[0].is_cuda else "cpu"]


def guesses(chain: Chain) -> Floats:
    """Seconds of each layer, roughly."""
    rate, bandwidth, launch, _ = _machine(chain)
    return np.array([max(layer.flops / rate, layer.bytes / bandwidth) + launch for layer in chain.layers])


def only_needed(planned: Plan) -> Plan:
    """The plan without the variants that are not needed to tell every layer apart."""
    return replace(planned, variants=planned.needed, rest=[*planned.variants[len(planned.needed) :], *planned.rest])


def refined(planned: Plan, seconds: Mapping[str, float]) -> Plan:
    """The same once some were built and took these seconds: those first, the others in the order that these times suggest.

    Guesses are of operations and bytes; on an engine that the host slows down every layer takes the same.
    """
    found = [*planned.variants, *planned.rest]
    needed = len(planned.needed)  # which are the first
    begin = [*range(needed), *(k for k, v in enumerate(found) if k >= needed and v.name in seconds)]
    speak = [v.name for v in found if v.name in seconds and v.name not in planned.silent]
    if not speak:
        return planned
    times = np.array([seconds[name] for name in speak])
    x_VP = columns(planned.design, speak, [])
    guess = np.zeros(x_VP.shape[1])
    guess[[FIRST + group for group in planned.design.groups]] = guesses(planned.chain)
    guess *= float(np.median(times / np.maximum(x_VP @ guess, 1e-12)))
    guess[0] = 0.5 * times.min()
    # Ridge: what was timed to some per cent, what was guessed to twice its size.
    error, prior = _SEEN_ERROR * times, np.maximum(2 * guess, 1e-12)
    design = np.concatenate([x_VP / error[:, None], np.diag(1 / prior)])
    fitted = np.linalg.lstsq(design, np.concatenate([times / error, guess / prior]), rcond=None)[0]
    piece = _ERROR if planned.alike else _PIECE_ERROR
    order = _ordered(planned.design, found, planned.silent, begin, np.maximum(fitted, 0.05 * guess), piece)
    ranked = [found[k] for k in order]
    most = len(planned.variants)
    return replace(planned, variants=ranked[:most], rest=ranked[most:])


def _ordered(
    design: Design, found: list[Variant], silent: frozenset[str], begin: list[int], guess_P: Floats, piece_error: float
) -> list[int]:
    """Numbers of those to `begin` with, then of all that are not silent, best first. `guess_P` is of the columns' unknowns."""
    x_VP = columns(design, [v.name for v in found], [])
    group_seconds = guess_P[FIRST:]
    # Prior standard deviations: a layer's guess may be wrong by its size.
    prior = np.concatenate([guess_P[:1], design.dear, 2 * group_seconds])
    begins = np.array([v.part[0] == 0 for v in found])
    error = (x_VP[:, FIRST:] @ group_seconds + guess_P[0]) * np.where(begins, _ERROR, piece_error)
    speaks = np.array([v.name not in silent for v in found])
    error[~speaks] = np.inf
    weight = np.zeros(len(prior))
    weight[FIRST:] = 1 / group_seconds**2
    covariance = np.diag(prior**2)
    order: list[int] = []
    left = speaks.copy()
    left[begin] = True
    for step in range(int(left.sum())):
        moved = x_VP @ covariance
        gain = (moved**2 @ weight) / (error**2 + np.einsum("vp,vp->v", moved, x_VP))
        best = begin[step] if step < len(begin) else int(np.where(left, gain, -1.0).argmax())
        order.append(best)
        left[best] = False
        covariance -= np.outer(moved[best], moved[best]) / (error[best] ** 2 + moved[best] @ x_VP[best])
    return order


def _known(x_VP: Floats) -> NDArray[np.bool_]:
    """Of each group, whether the variants determine its time."""
    x_VP = np.concatenate([x_VP, np.eye(FIRST, x_VP.shape[1])[1:]])  # the border's costs are known beforehand, more or less
    size = np.abs(x_VP).max(0)
    _, s, vt = np.linalg.svd(x_VP / np.where(size > 0, size, 1), full_matrices=False)
    span = vt[s > 1e-7 * s[0]]
    return ((span[:, FIRST:] ** 2).sum(0) > 1 - 1e-8) & (size[FIRST:] > 0)


def _needed(design: Design, names: list[str], silent: frozenset[str], known: int) -> int:
    """How many of the variants, from the first on, determine as many groups as all of them, and some to spare."""
    for count in range(min(known + 1, len(names)), len(names) + 1):
        x = columns(design, [name for name in names[:count] if name not in silent], [])
        if len(x) and _known(x).sum() == known:
            return min(len(names), count + max(2, round(_SPARE * count)))
    return len(names)


def _pieces(found: list[Variant], design: Design) -> list[int]:
    """Numbers of the programs of one layer, once, the first of each group."""
    first: dict[int, int] = {}
    for k, variant in enumerate(found):
        if len(variant.part) == 1:
            first.setdefault(design.groups[variant.part[0]], k)
    return list(first.values())


def _alone(found: list[Variant], guess: Floats) -> list[int]:
    """Numbers of a cheap layer alone, once and repeated: what a call costs, without which the first segment is never known."""
    where = {v.part: k for k, v in enumerate(found)}
    pairs = [(guess[part[0]], where[part[:1]], k) for part, k in where.items() if set(part) == {part[0]} and part[:1] in where]
    pairs = [pair for pair in pairs if pair[1] != pair[2]]
    return list(min(pairs)[1:]) if pairs else []


def _halves(found: list[Variant], layers: int) -> list[int]:
    """Numbers of the prefixes to the middle, the quarters, the eighths: wherever a budget ends, there are segments."""
    depth = {len(v.part): k for k, v in enumerate(found) if v.part == tuple(range(len(v.part))) and len(v.part) < layers}
    cuts = [round(layers * part / 8) for part in (4, 2, 6, 1, 3, 5, 7)]
    return list(dict.fromkeys(depth[cut] for cut in cuts if cut in depth))
