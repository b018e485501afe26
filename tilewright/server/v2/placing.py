"""Answers whose outputs are all in shared memory, kept for the next request with the same bytes."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tilewright.host.errors import Refused
from tilewright.host.regions import Part
from tilewright.host.tensors import Wire

__all__ = ["Placing"]


class Placing(NamedTuple):
    """An answer to a request: only the bytes of its outputs differ from one time to the next."""

    writes: tuple[tuple[int, Part, str, tuple[int, ...]], ...]
    """(number of the output, where its bytes go, datatype, shape) of each."""
    body: bytes

    @classmethod
    def of(cls, names: Sequence[str], places: Mapping[str, Part], outputs: Sequence[Wire], body: bytes) -> "Placing":
        """The answer with these outputs, which have these names, and this body; `places` says where each output goes."""
        found = [(number, places[name], *outputs[number][:2]) for number, name in enumerate(names) if name in places]
        return cls(tuple(found), body)

    def placed(self, outputs: Sequence[Wire]) -> bool:
        """Write outputs; return whether they were written: they are those of the answer, and there is room for them."""
        try:
            for number, part, datatype, shape in self.writes:
                wire = outputs[number]
                if wire.shape != shape or wire.datatype != datatype:
                    return False
                part.write(wire.raw)
        except Refused:
            return False
        return True
