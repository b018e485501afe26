"""Answers whose outputs are all in shared memory. They are kept for the next request with the same bytes."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tilewright.host.errors import Refused
from tilewright.host.regions import Part
from tilewright.host.tensors import Wire

__all__ = ["Placing"]


class Placing(NamedTuple):
    """A kept answer. When the same request comes again, only the bytes of the outputs differ."""

    writes: tuple[tuple[int, Part, str, tuple[int, ...]], ...]
    """(number of the output, part of shared memory for its bytes, datatype, shape) of each output."""
    body: bytes

    @classmethod
    def of(cls, names: Sequence[str], places: Mapping[str, Part], outputs: Sequence[Wire], body: bytes) -> "Placing":
        """Make one from an answer's outputs and body. `places`: name of an output -> the part to which it is written."""
        found = [(number, places[name], *outputs[number][:2]) for number, name in enumerate(names) if name in places]
        return cls(tuple(found), body)

    def placed(self, outputs: Sequence[Wire]) -> bool:
        """Write the outputs of a repeated request. Returns False if their datatypes or shapes differ, or they do not fit."""
        try:
            for number, part, datatype, shape in self.writes:
                wire = outputs[number]
                if wire.shape != shape or wire.datatype != datatype:
                    return False
                part.write(wire.raw)
        except Refused:
            return False
        return True
