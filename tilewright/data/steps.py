"""The steps that a recipe can name, and their classes."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from tilewright.data.decontaminate import Decontaminate
from tilewright.data.document import Document, Removed
from tilewright.data.exact import ExactDocuments, ExactLines, ExactSubstrings, GlobalStep
from tilewright.data.extract import Extract
from tilewright.data.language import Language
from tilewright.data.near import NearDuplicates
from tilewright.data.pii import MaskPII
from tilewright.data.quality import Quality
from tilewright.data.rules import RULES
from tilewright.data.thresholds import TABLE

__all__ = ["GLOBAL", "LOCAL", "LocalStep", "build", "stages"]

LocalStep = Callable[[Document], Document | Removed]

LOCAL: dict[str, Callable[..., LocalStep]] = {
    "extract": Extract,
    "language": Language,
    **RULES,
    "quality": Quality,
    "pii": MaskPII,
    "decontaminate": Decontaminate,
}
GLOBAL: dict[str, Callable[..., GlobalStep]] = {
    "exact-documents": ExactDocuments,
    "exact-lines": ExactLines,
    "exact-substrings": ExactSubstrings,
    "near-duplicates": NearDuplicates,
}


def build(step: dict[str, Any]) -> LocalStep | GlobalStep:
    """A step from its table in the recipe; raises ValueError for an unknown name or setting."""
    settings = dict(step)
    name = settings.pop("use", None)
    kind = LOCAL.get(str(name)) or GLOBAL.get(str(name))
    if kind is None:
        raise ValueError(f"a step has use = {name!r}, wanted one of {', '.join((*LOCAL, *GLOBAL))}")
    known = [row.name for row in TABLE if row.step == name] or list(inspect.signature(kind).parameters)
    if unknown := sorted(set(settings) - set(known)):
        raise ValueError(f"step {name!r} has no setting {unknown[0]!r}; its settings are {', '.join(sorted(known)) or 'none'}")
    try:
        return kind(**settings)
    except TypeError as error:
        raise ValueError(f"step {name!r}: {str(error).partition(') ')[2] or error}") from None


def stages(steps: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any] | None, list[dict[str, Any]]]]:
    """Divide the steps into stages, which begin at steps that need all documents (global steps).

    Returns [(None, local steps), (global step, local steps after it), ...].
    """
    cut: list[tuple[dict[str, Any] | None, list[dict[str, Any]]]] = [(None, [])]
    for step in steps:
        if step.get("use") in GLOBAL:
            cut.append((step, []))
        else:
            cut[-1][1].append(step)
    return cut
