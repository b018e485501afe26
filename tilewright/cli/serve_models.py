"""Decides which of the models given to `tilewright serve` are ordinary models rather than language models."""

from collections.abc import Sequence

from tilewright.extras import require

__all__ = ["split_models"]


def split_models(
    model: str, beside: Sequence[str], *, repository: bool, named: bool, name: str | None
) -> tuple[str | None, list[str]]:
    """(the language model or None, [NAME=]SOURCE of each ordinary model).

    Args:
        model: MODEL of the command line, or its default.
        beside: [NAME=]SOURCE of further models.
        repository: whether a model repository was given.
        named: whether MODEL was given. If it was not, the default is used only when there are no other models.
        name: the name under which MODEL is served, or None.
    """
    from tilewright.host.sources import is_ordinary

    ordinary = is_ordinary(model)
    models = ([f"{name}={model}" if name else model] if ordinary else []) + list(beside)
    if not models and not repository:
        return model, []
    require("serving ordinary models", "fastapi", "uvicorn", "prometheus_client")
    return (model if named and not ordinary else None), models
