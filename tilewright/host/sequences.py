"""Sequences: calls that continue one another. The outputs of one call under certain names are inputs of the next.

The state is kept in the server, not in the model's process: it survives the replacement of a process, and calls of different
sequences can share batches. Calls of one sequence are computed one after the other, in order of arrival. A sequence ends when a
call says so, or when it was not continued for `sequence_idle_s`. There are at most `max_sequences`.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from tilewright.host.errors import Overloaded, Refused
from tilewright.host.tensors import Signature, Wire, byte_size
from tilewright.host.version import Ask, Version

__all__ = ["Sequences", "outer"]


@dataclass(slots=True)
class _Sequence:
    """One sequence: its state and its queue of calls."""

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    state: dict[str, Wire] | None = None
    used_s: float = 0.0


def outer(signature: Signature, state: Mapping[str, str]) -> Signature:
    """The signature of a model with state, as clients see it. Raises ValueError if the model lacks a name of the state."""
    inputs, outputs = {s.name: s for s in signature.inputs}, {s.name: s for s in signature.outputs}
    for given, taken in state.items():
        if given not in inputs or taken not in outputs:
            missing = f"no input {given!r}" if given not in inputs else f"no output {taken!r}"
            raise ValueError(f"state says {given} = {taken!r}, but the model has {missing}")
        if (inputs[given].datatype, inputs[given].shape) != (outputs[taken].datatype, outputs[taken].shape):
            raise ValueError(f"state says {given} = {taken!r}, but their datatypes or shapes differ")
    return Signature(tuple(s for s in signature.inputs if s.name not in state), signature.outputs, signature.batched)


class Sequences:
    """The sequences of one version with state."""

    def __init__(self, version: Version):
        self._version = version
        self._state = version.config.state
        self._open: OrderedDict[int | str, _Sequence] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    async def infer(self, inputs: Mapping[str, Wire], ask: Ask) -> tuple[Wire, ...]:
        """Make a call of a sequence; a call without an id is a sequence by itself. Raises HostError."""
        if ask.sequence in (None, 0, ""):
            return await self._version.infer({**inputs, **self._zeros(inputs)}, ask)
        assert ask.sequence is not None
        sequence = self._of(ask.sequence, starts=ask.starts)
        async with sequence.turn:
            if ask.starts:
                sequence.state = None
            state = sequence.state or self._zeros(inputs)
            outputs = await self._version.infer({**inputs, **state}, ask)
            named = {spec.name: wire for spec, wire in zip(self._version.signature.outputs, outputs, strict=True)}
            sequence.state = {given: named[taken] for given, taken in self._state.items()}
            sequence.used_s = time.monotonic()
            if ask.ends and self._open.get(ask.sequence) is sequence:
                del self._open[ask.sequence]
        return outputs

    def _of(self, name: int | str, *, starts: bool) -> _Sequence:
        now_s, config = time.monotonic(), self._version.config
        while self._open:
            oldest = next(iter(self._open.values()))
            if oldest.turn.locked() or now_s - oldest.used_s < config.sequence_idle_s:
                break
            self._open.popitem(last=False)
        sequence = self._open.get(name)
        if sequence is None:
            if not starts:
                raise Refused(
                    f"{self._version.label}: the sequence {name!r} is not open; its first request needs sequence_start"
                )
            if len(self._open) >= config.max_sequences:
                raise Overloaded(f"{self._version.label}: {len(self._open)} sequences are open, the most permitted", 1.0)
            sequence = self._open[name] = _Sequence()
        sequence.used_s = now_s
        self._open.move_to_end(name)
        return sequence

    def _zeros(self, inputs: Mapping[str, Wire]) -> dict[str, Wire]:
        """The state before the first call, for as many rows as the request has."""
        rows = next((wire.shape[0] for wire in inputs.values() if wire.shape), 1)
        rows = min(max(rows, 0), self._version.config.max_batch)
        found = {}
        for spec in self._version.signature.inputs:
            if spec.name in self._state:
                shape = tuple((rows if at == 0 else 1) if n == -1 else n for at, n in enumerate(spec.shape))
                found[spec.name] = Wire(spec.datatype, shape, bytes(byte_size(spec.datatype, shape)))
        return found
