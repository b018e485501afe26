"""A kernel's TTGIR as a graph of values: the operands of each, and how addresses change from element to element.

Only as detailed as the analysis of memory accesses needs: a line of text is a value with its operands. `steps` follows the
arithmetic of Triton's address computations (ranges, products with constants, sums, broadcasts). For anything else (division,
gathered indices, control flow that changes a pointer's shape) it returns None: unknown, never guessed.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from tilewright.asm.layouts import TensorType, types_in

__all__ = ["Line", "Program", "Steps"]

Steps = tuple[int | None, ...]
"""For each dimension of a tensor, the difference of the value between neighbouring elements; None if unknown."""


class Line(NamedTuple):
    """One operation."""

    result: str | None
    name: str
    """"tt.load", "ttg.local_alloc" ..."""
    operands: tuple[str, ...]
    steps: tuple[Steps | None, ...]
    """Steps of each operand; () if its value is the same everywhere, None if nothing is known."""
    text: str
    """The line, without its location."""
    types: list[TensorType]
    looped: bool
    """Whether it is inside a loop."""


_LINE = re.compile(r'^(?:(%[\w$.-]+)(?::\d+)? = )?"?([a-z_]\w*\.[\w.]+)"?(.*)$')
_VALUE = re.compile(r"%[\w$.-]+(?:#\d+)?")
_CARRIED = re.compile(r"(%[\w$.-]+) = (%[\w$.-]+(?:#\d+)?)")
_PASSED = frozenset({"arith.extsi", "arith.extui", "arith.trunci", "ttg.convert_layout", "tt.broadcast", "arith.index_cast"})
_LOOPS = ("scf.for", "scf.while")


class Program:
    """The operations of a kernel in order.

    Values are followed in the order of the text, because MLIR may use a name again in a neighbouring region.
    """

    def __init__(self, ttgir: str):
        self.lines: list[Line] = []
        self._steps: dict[str, Steps | None] = {}
        self._constants: dict[str, int] = {}
        regions: list[bool] = []
        """For each open region, whether it belongs to a loop."""
        for raw in ttgir.splitlines():
            text = raw.split(" loc(")[0].strip()
            if text.startswith("}") and regions:
                regions.pop()
            found = _LINE.match(text)
            if found:
                self._add(found[1], found[2], found[3], text, any(regions))
            if text.endswith("{"):
                regions.append(bool(found and found[2] in _LOOPS))

    def named(self, *names: str) -> Iterator[Line]:
        """The operations with these names, in order."""
        return (line for line in self.lines if line.name in names)

    def _add(self, result: str | None, name: str, rest: str, text: str, looped: bool) -> None:
        operands = tuple(_VALUE.findall(rest.split(" : ")[0]))
        line = Line(result, name, operands, tuple(map(self._known, operands)), text, types_in(rest), looped)
        self.lines.append(line)
        if result is None:
            return
        if name in _LOOPS:
            # A value that a loop carries has the same steps as before the loop.
            for number, (inside, before) in enumerate(_CARRIED.findall(rest.partition("iter_args(")[2])):
                self._steps[inside] = self._steps[f"{result}#{number}"] = self._known(before)
        steps = _steps(line, [self._constants.get(operand) for operand in operands])
        shape = line.types[-1].shape if line.types else ()
        # Unknown, but with this rank: a broadcast of it is known to be constant along the new dimension.
        self._steps[result] = tuple(None if n > 1 else 0 for n in shape) if steps is None and shape else steps
        self._constants.pop(result, None)
        number = re.search(r"= arith\.constant (?:dense<)?(-?\d+)>? :", text)
        if number:
            self._constants[result] = int(number[1])
        elif (name in _PASSED or name in ("tt.splat", "tt.expand_dims")) and operands[0] in self._constants:
            self._constants[result] = self._constants[operands[0]]

    def _known(self, value: str) -> Steps | None:
        """The steps of a value; arguments of the kernel and loop counters have none."""
        return self._steps.get(value, self._steps.get(value.partition("#")[0], ()))


def _steps(line: Line, constants: list[int | None]) -> Steps | None:
    of = line.steps
    match line.name:
        case "tt.make_range":
            return (1,)
        case "tt.splat" | "arith.constant":
            return ()
        case "tt.expand_dims":
            axis = int(re.findall(r"axis = (\d+)", line.text)[0])
            return (*of[0][:axis], 0, *of[0][axis:]) if of[0] else of[0]
        case "tt.trans":
            order = [int(n) for n in re.findall(r"\d+", line.text.partition("order = array<i32:")[2].partition(">")[0])]
            return tuple(of[0][i] for i in order) if of[0] else of[0]
        case "arith.addi" | "tt.addptr":
            return _sum(of[0], of[1], 1)
        case "arith.subi":
            return _sum(of[0], of[1], -1)
        case "arith.muli":
            return _product(of[0], of[1], constants[1]) if _uniform(of[1]) else _product(of[1], of[0], constants[0])
        case name if name in _PASSED:
            return of[0]
    # Its result is the same everywhere if its operands are, whatever it computes. Control flow may choose between two of them.
    return () if not line.name.startswith("scf.") and all(map(_uniform, of)) else None


def _uniform(steps: Steps | None) -> bool:
    return steps is not None and all(step == 0 for step in steps)


def _product(moving: Steps | None, other: Steps | None, factor: int | None) -> Steps | None:
    """A product changes evenly if the other factor is the same everywhere, and by a known step if that is a constant."""
    if moving is None or not _uniform(other):
        return None
    return tuple(0 if step == 0 else None if factor is None or step is None else step * factor for step in moving)


def _sum(a: Steps | None, b: Steps | None, sign: int) -> Steps | None:
    if a is None or b is None:
        return None
    rank = max(len(a), len(b))
    a, b = a or (0,) * rank, b or (0,) * rank
    return tuple(None if x is None or y is None else x + sign * y for x, y in zip(a, b, strict=True))
