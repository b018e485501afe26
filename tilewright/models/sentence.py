"""How a text's embedding is computed from the features of its tokens, by sentence-transformers' files in a model folder.

`modules.json` lists a transformer, a pooling and optionally a normalisation; the pooling's folder has a config.json. Without
it, the usual defaults are used: the mean for encoders, the last token for decoders, normalised to length 1 in both cases.

Refused: other modules, such as dense layers after the pooling, and poolings that combine several kinds.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from tilewright.models.encoders import means
from tilewright.models.errors import ModelError
from tilewright.models.files import read_json, read_text
from tilewright.nn import Lengths

__all__ = ["Pooling"]

_MODES = {"cls_token": "first", "mean_tokens": "mean", "lasttoken": "last"}
_NAMES = {"cls": "first", "mean": "mean", "lasttoken": "last", "last": "last"}


@dataclass(frozen=True, kw_only=True)
class Pooling:
    """method: "first", "last" or "mean" of a text's tokens. normalise: whether embeddings are scaled to length 1."""

    method: str
    normalise: bool = True

    @classmethod
    def of(cls, folder: Path | None, default: str) -> "Pooling":
        """The pooling in a folder's files; `default` if there are none. Raises ModelError."""
        if folder is None or not (folder / "modules.json").exists():
            return cls(method=default)
        path = folder / "modules.json"
        try:
            modules = json.loads(read_text(path))
        except (ValueError, RecursionError) as error:
            raise ModelError(f"{path} is not JSON ({error}); download it again") from error
        if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
            raise ModelError(f"{path} must hold a list of modules; download it again")
        kinds = [str(module.get("type")).rpartition(".")[2] for module in modules]
        if kinds[:2] != ["Transformer", "Pooling"] or kinds[2:] not in ([], ["Normalize"]):
            raise ModelError(
                f"{path} lists {', '.join(kinds)[:200]}; supported are Transformer, Pooling and, optionally, Normalize"
            )
        return cls(method=_method(folder, modules[1]), normalise=len(kinds) > 2)

    def __call__(self, hidden: Tensor, lengths: Lengths, size: int | None = None) -> Tensor:
        """[T, E] of packed texts -> [B, E] float32, or [B, size] of the first numbers."""
        if self.method == "mean":
            pooled = means(hidden.float(), lengths)
        else:
            pooled = hidden[(lengths.cu[:-1] if self.method == "first" else lengths.cu[1:] - 1).long()].float()
        if size is not None:
            pooled = pooled[:, :size]
        return F.normalize(pooled, dim=1) if self.normalise else pooled


def _method(folder: Path, module: dict[str, Any]) -> str:
    name = str(module.get("path") or "")
    if name != Path(name).name or name in ("", ".", ".."):
        raise ModelError(f"{folder / 'modules.json'} names {name[:200]!r} as a folder, wanted a folder beside it")
    raw = read_json(folder / name / "config.json")
    given: Sequence[str] = [key.removeprefix("pooling_mode_") for key, value in raw.items() if value is True]
    modes = [_MODES.get(key) for key in given if key in _MODES or key.endswith(("tokens", "token"))]
    if isinstance(raw.get("pooling_mode"), str):
        modes = [_NAMES.get(raw["pooling_mode"])]
    if len(modes) != 1 or modes[0] is None:
        raise ModelError(
            f"{folder / name / 'config.json'} has the pooling {given or raw.get('pooling_mode')}; supported: "
            f"{', '.join(_MODES)}"
        )
    return modes[0]
