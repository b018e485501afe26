"""Decides which of the models given to `tilewright serve` are ordinary models rather than language models."""

from collections.abc import Sequence

from tilewright.extras import require

__all__ = ["split_models"]


def split_models(
    model: str, beside: Sequence[str], *, repository: bool, named: bool, name: str | None
) -> tuple[str | None, list[str]]:
    """(the language model or None, [NAME=]SOURCE of the ordinary ones).

    Args:
        model: MODEL of the command line, or its default.
        beside: [NAME=]SOURCE of further models.
        repository: whether there is one.
        named: whether MODEL was given. A default steps back behind models that were.
        name: of MODEL.
    """
    from tilewright.host.sources import is_ordinary

    ordinary = is_ordinary(model)
    models = ([f"{name}={model}" if name else model] if ordinary else []) + list(beside)
    if not models and not repository:
        return model, []
    require("serving ordinary models", "fastapi", "uvicorn", "prometheus_client")
    return (model if named and not ordinary else None), models
