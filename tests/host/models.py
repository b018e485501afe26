"""Models that a process of their own loads: healthy ones, and some that break on purpose."""

import os
import time

import torch
from torch import Tensor, nn

from tilewright.fuse import optimize


class Marked(nn.Module):
    """tanh(x) * weight; a row that begins with -1 raises, -2 ends the process, -3 hangs, -4 becomes NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 5.0))

    def forward(self, x: Tensor) -> Tensor:
        marks = x[:, 0].tolist()
        if -1.0 in marks:
            raise RuntimeError("a poisoned row\nand a second line")
        if -2.0 in marks:
            os._exit(3)
        if -3.0 in marks:
            time.sleep(3600)
        found = torch.tanh(x) * self.weight
        return torch.where(x[:, :1] == -4, torch.nan, found)


class Two(nn.Module):
    """Two inputs of different datatypes, three outputs by name."""

    def forward(self, ids: Tensor, scale: Tensor) -> dict[str, Tensor]:
        scaled = ids * scale
        return {"scaled": scaled, "half": scaled.to(torch.bfloat16), "positive": ids > 0}


class Whole(nn.Module):
    """Rows that look at each other: no batching."""

    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(0)


class Reshapes(nn.Module):
    """Changes the shape of its input in place, and divides by zero: both infinities are no NaN."""

    def forward(self, x: Tensor) -> Tensor:
        x.unsqueeze_(1)
        return (x / 0.0).squeeze(1)


class Wide(nn.Module):
    """Rows of 256 kB, doubled."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class Overflows(nn.Module):
    """Rows of 256 kB, doubled; NaN if a square overflows."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x + 0 * (x * x)


class Writes(nn.Module):
    """Rows of 256 kB, doubled in place, after which -2 in a row raises."""

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        if -2.0 in x[:, 0].tolist():
            raise RuntimeError("a poisoned row")
        return x[:, :64]


class Slow(nn.Module):
    """Rows of 256 kB, doubled, in a tenth of a second without the processor; -2 in the first row ends the process."""

    def forward(self, x: Tensor) -> Tensor:
        if x[0, 0] == -2:
            os._exit(3)
        if len(x) > 1:
            time.sleep(0.1)
        return 2 * x


class Turned(nn.Module):
    """The first 8,192 numbers of rows, multiplied by the identity very often and doubled: exact, and slow for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.same = nn.Linear(8192, 8192, bias=False)
        with torch.no_grad():
            self.same.weight.copy_(torch.eye(8192))

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, :8192]
        for _ in range(200):
            x = self.same(x)
        return 2 * x


def replayed() -> tuple[nn.Module, Tensor]:
    """A model for a GPU that is always a CUDA graph, for eight rows."""
    x = torch.full((8, 1 << 16), 0.5, device="cuda")
    return optimize(Turned().cuda(), x, "fp16", report=False, measure=False, search=0), x


def writes() -> tuple[nn.Module, Tensor]:
    return Writes(), torch.full((1, 1 << 16), 0.5)


def slow() -> tuple[nn.Module, Tensor]:
    return Slow(), torch.randn(1, 1 << 16)


def wide() -> tuple[nn.Module, Tensor]:
    return Wide(), torch.randn(1, 1 << 16)


def overflows() -> tuple[nn.Module, Tensor]:
    return Overflows(), torch.full((1, 1 << 16), 0.5)


def reshapes() -> tuple[nn.Module, Tensor]:
    return Reshapes(), torch.randn(2, 3)


def marked() -> tuple[nn.Module, Tensor]:
    return Marked(), torch.randn(3, 4)


def two() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return Two(), (torch.randint(-5, 5, (2, 3)), torch.randn(2, 1))


def whole() -> tuple[nn.Module, Tensor]:
    return Whole(), torch.randn(4, 2)


def raises() -> tuple[nn.Module, Tensor]:
    raise RuntimeError("no weights here")


def ends() -> tuple[nn.Module, Tensor]:
    os._exit(1)
