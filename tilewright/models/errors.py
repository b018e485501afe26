"""The exception for model folders, and the message about a model that is not supported."""

import re
from collections.abc import Iterable
from difflib import SequenceMatcher

__all__ = ["ModelError", "unknown"]

_NEAREST = 3
_DECODER = "ForCausalLM"
"""How the names of most architectures end; the message leaves it out, so that it stays readable."""


class ModelError(ValueError):
    """A model folder that cannot be used; the message says what is wrong, and what to do."""


def unknown(architecture: str, known: Iterable[str]) -> str:
    """The message about an architecture that is not supported: the most similar supported ones, then all."""
    names, short = sorted(known), architecture[:100]
    near = sorted(names, key=lambda name: -_likeness(short, name))[:_NEAREST]
    decoders = sorted(name.removesuffix(_DECODER) for name in names if name.endswith(_DECODER))
    others = [name for name in names if not name.endswith(_DECODER)]
    some = f"supported with the ending {_DECODER}: {', '.join(decoders)}; and " if decoders else "supported: "
    return f"architecture {short} is not supported; the nearest that are: {', '.join(near)}; {some}{', '.join(others)}"


def _likeness(a: str, b: str) -> float:
    """The similarity of two families' names, without the part about the task; a common beginning counts once more."""
    one, other = (re.split("For[A-Z]", name)[0].lower() for name in (a, b))
    return SequenceMatcher(None, one, other).ratio() + _begins_alike(one, other) / max(len(one), len(other), 1)


def _begins_alike(one: str, other: str) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
