"""The protocol between an engine process and its front processes: msgpack lists of plain values, nothing else.

A message is a list whose first item is its kind. Both sides check every item that they read. From a message they build only
numbers, text, arrays of known types and the classes of this file. An invalid message raises `WireError`, with a message of one
sentence.

| kind            | from   | content                                                                                   |
|-----------------|--------|-------------------------------------------------------------------------------------------|
| hello           | both   | the protocol's version; the engine's hello also has the front's number and what is served |
| submit          | front  | prompts as token ids, their parameters, and the numbers of their streams                  |
| abort, stop     | front  | requests whose answers are no longer needed; streams in which a stop string was found     |
| look, grammar   | front  | a question that the engine answers between two steps; a grammar to compile                |
| adapter         | front  | a question about LoRA adapters: list, load or unload; a name; a folder                    |
| pass            | front  | texts for an embedding or score pass between two steps                                    |
| counts          | front  | the increase of its counters for /metrics, and the current values of its gauges           |
| step            | engine | one step: streams, counts and tokens as arrays, and notes on the few rows that have any   |
| answer, refused | engine | the reply to submit, look, grammar, adapter and pass, with the number of the question     |
| tick            | engine | twice per second: number of steps sent to this front, number of steps that failed lately  |
| ended, bye      | both   | ended: why the engine has failed; bye: the front confirms it                              |
| lost            | engine | the engine has dropped this front and aborted all its requests                            |

The upper bits of a stream's number are the number of its front (see `FRONT_BITS`). So the engine can split a step between
fronts without a lookup.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tilewright.engine.deltas import Note, StepDeltas
from tilewright.engine.grammar import Grammar
from tilewright.engine.pooling import Pass, Text
from tilewright.engine.request import SamplingParams, TokenLogprobs, shown
from tilewright.extras import needed

msgpack: Any = needed("msgpack", "serve")

__all__ = [
    "FRONT_BITS",
    "MAX_FROM_ENGINE_BYTES",
    "MAX_FROM_FRONT_BYTES",
    "WIRE_VERSION",
    "Submit",
    "WireError",
    "address_of",
    "check",
    "pack",
    "pack_pass",
    "pack_step",
    "pack_submit",
    "read_grammar",
    "read_numbers",
    "read_pass",
    "read_step",
    "read_submit",
    "read_table",
    "unpack",
    "write_grammar",
    "write_table",
]

WIRE_VERSION = 2
"""Both sides must have the same version. Increase it with every change of a message."""
FRONT_BITS = 40
"""Number of lower bits of a stream's number. The front assigns these; the bits above are the number of the front."""
MAX_FROM_FRONT_BYTES = 64 << 20
"""Largest message from a front: the prompts of one request."""
MAX_FROM_ENGINE_BYTES = 256 << 20
"""Largest message from the engine: the first one contains the tokenizer, later ones the log-probabilities of long prompts."""
MAX_PROMPTS = 65536
MAX_NAMES = 4096
"""Most counts, and most gauges, in one message."""
REASONS = (None, "stop", "length", "abort", "error", "expired")
_PARAMS = {field.name: field for field in dataclasses.fields(SamplingParams)}


class WireError(ValueError):
    """A message that does not follow this protocol: the other side has a bug or another version."""


class Submit(NamedTuple):
    """The prompts of one HTTP request."""

    number: int
    ids: list[str]
    prompts: list[list[int]]
    params: list[SamplingParams]
    streams: list[list[int]]
    """Stream numbers: one list per prompt, one number per sample. They do not contain the number of the front."""
    max_wait_s: float | None


def address_of(folder: Path) -> str:
    """The address at which the engine of a server listens. `folder` is private to the user (mode 0700)."""
    return f"ipc://{folder}/engine"


def pack(*message: Any) -> bytes:
    """Encode a message of plain values."""
    return msgpack.packb(message, use_bin_type=True)


def unpack(raw: bytes) -> list[Any]:
    """Decode a message into a list, whose first item is a text. Raises WireError."""
    try:
        message = msgpack.unpackb(raw, raw=False, strict_map_key=False, use_list=True)
    except (ValueError, TypeError, RecursionError, OverflowError, msgpack.exceptions.UnpackException) as error:
        raise WireError(f"a message is not valid msgpack: {type(error).__name__}: {error}") from None
    if not isinstance(message, list) or not message or not isinstance(message[0], str):
        raise WireError(f"a message is {shown(message, 60)}, wanted a list that begins with its kind")
    return message


def check(message: Sequence[Any], *kinds: type | tuple[type, ...]) -> list[Any]:
    """The items after a message's kind. Raises WireError unless their number and types match `kinds`."""
    items = list(message[1:])
    wanted = [kind if isinstance(kind, tuple) else (kind,) for kind in kinds]
    if len(items) != len(kinds) or any(type(item) not in kind for item, kind in zip(items, wanted)):
        got = ", ".join(type(item).__name__ for item in items[:8])
        names = ", ".join("|".join(one.__name__ for one in kind) for kind in wanted)
        raise WireError(f"a message {shown(message[0], 30)} has fields of types ({got}), wanted ({names})")
    return items


# Steps ----------------------------------------------------------------------------------------------------------------


def pack_step(number: int, step: StepDeltas) -> bytes:
    """Encode a step; it is the `number`-th that this front gets."""
    arrays = (step.streams.astype("<i8"), step.counts.astype("<i4"), step.tokens.astype("<i4"))
    return pack("step", number, *(array.tobytes() for array in arrays), [_write_note(note) for note in step.notes])


def read_step(message: Sequence[Any]) -> tuple[int, StepDeltas]:
    """Decode a step: (number, the step). Raises WireError."""
    number, streams, counts, tokens, notes = check(message, int, bytes, bytes, bytes, list)
    step = StepDeltas(_array(streams, "<i8"), _array(counts, "<i4"), _array(tokens, "<i4"))
    if len(step.counts) != len(step) or (step.counts < 0).any() or step.counts.sum(dtype=np.int64) != len(step.tokens):
        raise WireError(
            f"a step has {len(step)} streams, {len(step.counts)} counts and {len(step.tokens)} tokens, which do not fit "
            "together"
        )
    read = tuple(_read_note(note, len(step)) for note in notes)
    return number, dataclasses.replace(step, notes=read)


def _array(raw: bytes, kind: str) -> np.ndarray:
    size = np.dtype(kind).itemsize
    if len(raw) % size:
        raise WireError(f"an array has {len(raw)} bytes, wanted a multiple of {size}")
    return np.frombuffer(raw, kind)


def _write_note(note: Note) -> list[Any]:
    prompt = note.prompt_logprobs
    logprobs = [_write_logprobs(note.logprobs), None if prompt is None else _write_logprobs(prompt)]
    return [*note[: Note._fields.index("logprobs")], *logprobs]


def _read_note(value: Any, rows: int) -> Note:
    if not isinstance(value, list):
        raise WireError(f"a note is {shown(value, 60)}, wanted a list")
    none = type(None)
    row, reason, stop, error, retry_s, cached, logprobs, prompt = check(
        ["note", *value], int, (str, none), (int, none), (str, none), (float, none), (int, none), bytes, (bytes, none)
    )
    if not 0 <= row < rows or reason not in REASONS:
        raise WireError(
            f"a note is for row {row} of {rows} with the finish reason {shown(reason, 30)}; wanted an existing row and "
            f"one of {REASONS}"
        )
    before = None if prompt is None else _read_logprobs(prompt)
    return Note(row, reason, stop, error, retry_s, cached, _read_logprobs(logprobs), before)


_ENTRY = np.dtype([("token", "<i4"), ("rank", "<i4"), ("logprob", "<f8"), ("more", "<i4")])
"""A token. The `more` rows after it are its most likely alternatives."""


def _write_logprobs(entries: Sequence[TokenLogprobs]) -> bytes:
    rows: list[tuple[int, int, float, int]] = []
    for entry in entries:
        rows.append((entry.token_id, entry.rank, entry.logprob, len(entry.top)))
        rows += ((token, 0, logprob, 0) for token, logprob in entry.top)
    return np.array(rows, _ENTRY).tobytes() if rows else b""


def _read_logprobs(raw: bytes) -> tuple[TokenLogprobs, ...]:
    rows = np.frombuffer(raw, _ENTRY).tolist() if len(raw) % _ENTRY.itemsize == 0 else None
    if rows is None:
        raise WireError(f"log-probabilities have {len(raw)} bytes, wanted a multiple of {_ENTRY.itemsize}")
    made: list[TokenLogprobs] = []
    at = 0
    while at < len(rows):
        token, rank, logprob, more = rows[at]
        if not 0 <= more < len(rows) - at:
            raise WireError(
                f"the log-probabilities of a token announce {more} alternatives, but only {len(rows) - at - 1} rows follow"
            )
        made.append(TokenLogprobs(token, logprob, rank, tuple((row[0], row[2]) for row in rows[at + 1 : at + 1 + more])))
        at += 1 + more
    return tuple(made)


# Requests -------------------------------------------------------------------------------------------------------------


def pack_submit(submit: Submit) -> bytes:
    """Encode a submission. Raises ValueError if the prompts are too long for one message."""
    prompts = [np.array(prompt, "<i4").tobytes() for prompt in submit.prompts]
    known: dict[int, dict[str, Any]] = {}
    params = [known.setdefault(id(one), _write_params(one)) for one in submit.params]
    raw = pack("submit", submit.number, submit.ids, prompts, params, submit.streams, submit.max_wait_s)
    if len(raw) > MAX_FROM_FRONT_BYTES:
        raise ValueError(
            f"the request needs {len(raw)} bytes as a message to the engine, wanted at most {MAX_FROM_FRONT_BYTES}"
        )
    return raw


def read_submit(message: Sequence[Any]) -> Submit:
    """Decode a submission. Raises WireError, and ValueError for parameters out of their range."""
    number, ids, prompts, params, streams, wait_s = check(message, int, list, list, list, list, (float, type(None)))
    if not 0 < len(ids) <= MAX_PROMPTS or not len(ids) == len(prompts) == len(params) == len(streams):
        raise WireError(
            f"a submission has {len(ids)} ids, {len(prompts)} prompts, {len(params)} params and {len(streams)} lists of "
            f"streams; wanted the same number of each, 1 to {MAX_PROMPTS}"
        )
    if not all(isinstance(one, str) and one for one in ids) or not all(isinstance(one, bytes) for one in prompts):
        raise WireError("a submission has an id that is not text, or a prompt that is not an array")
    if not all(isinstance(one, list) and all(type(s) is int and 0 <= s < 1 << FRONT_BITS for s in one) for one in streams):
        raise WireError(f"a submission has a stream that is not a number below 2**{FRONT_BITS}")
    tokens = [_array(one, "<i4").tolist() for one in prompts]
    wait_s = None if wait_s is None or math.isinf(wait_s) else wait_s
    return Submit(number, ids, tokens, [_read_params(one) for one in params], streams, wait_s)


def _write_params(params: SamplingParams) -> dict[str, Any]:
    """The fields that differ from their defaults."""
    values = {name: getattr(params, name) for name in _PARAMS}
    changed = {name: value for name, value in values.items() if value != _default(name)}
    if params.grammar is not None:
        changed["grammar"] = write_grammar(params.grammar)
    if params.logit_bias:
        changed["logit_bias"] = dict(params.logit_bias)
    return changed


def _default(name: str) -> Any:
    field = _PARAMS[name]
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _read_params(values: Any) -> SamplingParams:
    if not isinstance(values, dict) or not values.keys() <= _PARAMS.keys():
        raise WireError(f"parameters are {shown(values, 60)}, wanted fields of SamplingParams")
    if "grammar" in values:
        values["grammar"] = read_grammar(values["grammar"])
    for name, value in values.items():
        if isinstance(value, bool) != isinstance(_default(name), bool):
            raise WireError(f"the parameter {name} has the wrong type: {shown(value, 60)}")
    try:
        return SamplingParams(**values)
    except TypeError as error:
        raise WireError(f"the parameters of a request are not valid: {error}") from None


def pack_pass(number: int, work: Pass) -> bytes:
    """Encode a pass; `number` identifies its answer."""
    ids = [np.array(text.ids, "<i4").tobytes() for text in work.texts]
    types = [None if text.types is None else np.array(text.types, "<i4").tobytes() for text in work.texts]
    return pack("pass", number, ids, types, work.labels, work.dimensions)


def read_pass(message: Sequence[Any]) -> tuple[int, Pass]:
    """Decode a pass: (number, the pass). Raises WireError."""
    number, ids, types, labels, dimensions = check(message, int, list, list, bool, (int, type(None)))
    if not ids or len(ids) != len(types) or not all(isinstance(one, bytes) and one for one in ids):
        raise WireError(
            f"a pass has {len(ids)} texts and {len(types)} lists of token types; wanted the same number of each, at least 1"
        )
    if not all(one is None or (isinstance(one, bytes) and len(one) == len(ids[i])) for i, one in enumerate(types)):
        raise WireError("a pass has a list of token types whose length differs from the number of tokens of its text")
    kinds = [None if one is None else _array(one, "<i4").tolist() for one in types]
    texts = tuple(Text(_array(one, "<i4").tolist(), kind) for one, kind in zip(ids, kinds, strict=True))
    return number, Pass(texts, labels, dimensions)


def write_table(table: np.ndarray) -> list[Any]:
    """Encode a float32 [rows, columns] as plain values."""
    return [*table.shape, table.astype("<f4").tobytes()]


def read_table(value: Any) -> np.ndarray:
    """Decode a float32 [rows, columns]. Raises WireError."""
    rows, columns, raw = check(["table", *(value if isinstance(value, list) else ())], int, int, bytes)
    numbers = _array(raw, "<f4")
    if rows < 0 or columns < 0 or rows * columns != len(numbers):
        raise WireError(f"a table is announced with {rows} rows and {columns} columns, but has {len(numbers)} numbers")
    return numbers.reshape(rows, columns)


def write_grammar(grammar: Grammar) -> list[Any]:
    """A grammar as plain values."""
    return [grammar.kind, grammar.source, [list(ids) for ids in grammar.after]]


def read_grammar(value: Any) -> Grammar:
    """Decode a grammar. Raises WireError, and ValueError for an invalid grammar."""
    if not isinstance(value, list):
        raise WireError(f"a grammar is {shown(value, 60)}, wanted a list")
    kind, source, after = check(["grammar", *value], str, str, list)
    if not all(isinstance(ids, list) and all(type(token) is int for token in ids) for ids in after):
        raise WireError("the field after of a grammar must be a list of lists of token ids")
    return Grammar(kind, source, tuple(map(tuple, after)))


def read_numbers(value: Mapping[Any, Any], most: int = MAX_NAMES) -> dict[str, float]:
    """Check a mapping of names to finite numbers. Raises WireError."""
    is_number: Callable[[Any], bool] = lambda one: type(one) in (int, float) and math.isfinite(one)  # noqa: E731
    if len(value) > most or not all(isinstance(name, str) and is_number(one) for name, one in value.items()):
        raise WireError(f"counts must be at most {most} finite numbers by name")
    return dict(value)
