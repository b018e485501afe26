"""The forms of a model's parameters in checkpoints: which tensors represent a parameter, and conversion in both directions.

| form             | tensors                                                                      | in checkpoints of          |
|------------------|------------------------------------------------------------------------------|----------------------------|
| `PARTS`          | one for each part of a merged parameter, in the order of its rows            | most                       |
| `WHOLE`          | one for all parts                                                            | Phi-3, GLM                 |
| `PLUS_ONE`       | the parameter minus 1: a norm's weight that begins with zeros                | Gemma                      |
| `Experts`        | one for all experts, input before output, gate and up interleaved            | gpt-oss                    |
| `TRANSPOSED`     | one for all parts, input before output                                       | GPT-2                      |
| `PerHead`        | one, in which the query, key and value of a head follow each other           | GPT-NeoX                   |
| `Bank`           | one for all experts, [X, R, C]                                               | Granite's mixtures         |
| `ONE_ROW`        | a vector as a matrix of one row                                              | ERNIE 4.5's mixtures       |
| `MXExperts`      | the same in mxfp4: `_blocks`, two values per byte, and `_scales`, one for 32 | gpt-oss, as published      |

`views` divides a parameter into views, one for each name; `put` fills a view from what is read, `get` is the inverse. All of
them work on "meta", for shapes only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.formats import unpack_int4
from tilewright.models.errors import ModelError
from tilewright.models.layouts import Wanted

__all__ = [
    "FLOATS", "ONE_ROW", "PARTS", "PLUS_ONE", "TRANSPOSED", "WHOLE", "Bank", "Experts", "Form", "MXExperts", "PerHead",
]  # fmt: skip

FLOATS = ("BF16", "F16", "F32", "F64")
"""dtypes of float tensors, by their names in safetensors."""
Read = Callable[[str], Tensor]

# X experts, P projections of one input (gate and up, or one), R rows of one, C columns


class Form:
    """The form `PARTS`; subclasses override what differs."""

    moves = False
    """Whether rows are elsewhere in the checkpoint than in the parameter, so that codes of other libraries do not fit."""

    def rows(self, parts: Sequence[int]) -> tuple[int, ...]:
        """Rows of each tensor, for a parameter whose parts have these numbers of rows."""
        return tuple(parts)

    def views(self, parameter: Tensor, parts: Sequence[int]) -> Sequence[Tensor]:
        """One view for each name."""
        return parameter.split(self.rows(parts))

    def tensors(self, name: str, view: Tensor) -> dict[str, Wanted]:
        """The tensors that a checkpoint must have for a view."""
        return {name: Wanted((tuple(view.shape),), FLOATS)}

    def put(self, view: Tensor, name: str, read: Read) -> None:
        """Fill a view."""
        view.copy_(read(name))

    def get(self, view: Tensor, name: str) -> dict[str, Tensor]:
        """The inverse of `put`: the tensors that it would read."""
        return {name: view}


class _Whole(Form):
    def rows(self, parts: Sequence[int]) -> tuple[int, ...]:
        return (sum(parts),)


class _PlusOne(Form):
    """The parameter should be float32, so that adding 1 can be undone to within 2^-24."""

    def put(self, view: Tensor, name: str, read: Read) -> None:
        view.copy_(read(name)).add_(1)

    def get(self, view: Tensor, name: str) -> dict[str, Tensor]:
        return {name: view - 1}


class _OneRow(_Whole):
    def views(self, parameter: Tensor, parts: Sequence[int]) -> Sequence[Tensor]:
        return (parameter[None],)


class _Transposed(_Whole):
    moves = True

    def views(self, parameter: Tensor, parts: Sequence[int]) -> Sequence[Tensor]:
        return (parameter.mT,)


PARTS, WHOLE, PLUS_ONE, ONE_ROW, TRANSPOSED = Form(), _Whole(), _PlusOne(), _OneRow(), _Transposed()


@dataclass(frozen=True)
class PerHead(_Whole):
    """Three parts of H heads each, [3 H D, C] (or a bias [3 H D]), whose rows are [H, 3, D] in the checkpoint."""

    moves = True
    heads: int

    def views(self, parameter: Tensor, parts: Sequence[int]) -> Sequence[Tensor]:
        return (parameter.unflatten(0, (3, self.heads, -1)).transpose(0, 1),)

    def tensors(self, name: str, view: Tensor) -> dict[str, Wanted]:
        heads, three, dim, *rest = view.shape
        return {name: Wanted(((heads * three * dim, *rest),), FLOATS)}

    def put(self, view: Tensor, name: str, read: Read) -> None:
        view.copy_(read(name).unflatten(0, view.shape[:3]))

    def get(self, view: Tensor, name: str) -> dict[str, Tensor]:
        return {name: view.flatten(0, 2)}


@dataclass(frozen=True)
class Bank(_Whole):
    """A stacked parameter [X P R, C] as one tensor [X, P R, C]."""

    moves = True
    experts: int

    def views(self, parameter: Tensor, parts: Sequence[int]) -> Sequence[Tensor]:
        return (parameter.unflatten(0, (self.experts, -1)),)


@dataclass(frozen=True)
class Experts(Form):
    """A stacked parameter [X P R, C] (or a bias [X P R]) as one tensor [X, C, R P] (or [X, R P])."""

    experts: int
    projections: int

    def rows(self, parts: Sequence[int]) -> tuple[int, ...]:
        return (sum(parts),)

    def views(self, parameter: Tensor, parts: Sequence[int]) -> Sequence[Tensor]:
        split = parameter.unflatten(0, (self.experts, self.projections, -1))
        return (split.permute(0, 3, 2, 1) if split.dim() == 4 else split.mT,)

    def tensors(self, name: str, view: Tensor) -> dict[str, Wanted]:
        return {name: Wanted(((*view.shape[:-2], view.shape[-2] * view.shape[-1]),), FLOATS)}

    def put(self, view: Tensor, name: str, read: Read) -> None:
        view.copy_(read(name).unflatten(-1, view.shape[-2:]))

    def get(self, view: Tensor, name: str) -> dict[str, Tensor]:
        return {name: view.flatten(-2)}


_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BLOCK = 32


class MXExperts(Experts):
    """The weights of `Experts` in mxfp4, [X, R P, C / 32, 16] and scales [X, R P, C / 32]: read as floats, never written."""

    def tensors(self, name: str, view: Tensor) -> dict[str, Wanted]:
        experts, cols, rows, projections = view.shape
        if cols % _BLOCK:
            raise ModelError(
                f"{name}: mxfp4 has blocks of {_BLOCK} columns, so the number of columns must be a multiple of that; got {cols}"
            )
        shape = (experts, rows * projections, cols // _BLOCK)
        return {f"{name}_blocks": Wanted(((*shape, 16),), ("U8",)), f"{name}_scales": Wanted((shape,), ("U8",))}

    def put(self, view: Tensor, name: str, read: Read) -> None:
        codes, scales = read(f"{name}_blocks"), read(f"{name}_scales")
        # The largest checkpoint has a billion values per layer, so convert one expert at a time.
        for target, blocks, powers in zip(view, codes, scales, strict=True):
            numbers = _decoded(blocks.to(view.device), powers.to(view.device))
            target.copy_(numbers.mT.unflatten(-1, target.shape[-2:]))


def _decoded(blocks: Tensor, powers: Tensor) -> Tensor:
    """[R, B, 16] and [R, B], both uint8 -> [R, 32 B] float32. The highest bit is the sign; a scale is 2^(power - 127)."""
    table = torch.tensor([*_FP4, *(-number for number in _FP4)], device=blocks.device)
    return torch.ldexp(table[unpack_int4(blocks).long()], powers.to(torch.int32)[..., None] - 127).flatten(1)
