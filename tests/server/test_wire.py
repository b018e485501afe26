"""What goes over the socket comes out as it went in; what nobody sane would send is refused, and hurts nobody."""

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgpack
import numpy as np
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.awake import until
from tests.server import fake_engine
from tests.server.fake_engine import behind_a_socket, running
from tests.server.victim import ALPHABET_TEXT
from tilewright.engine.deltas import Note, StepDeltas, StepRows
from tilewright.engine.grammar import Grammar
from tilewright.engine.pooling import Pass, Text
from tilewright.engine.request import SamplingParams, TokenLogprobs
from tilewright.server import wire
from tilewright.server.prompts import Served
from tilewright.server.remote import ask_for_served
from tilewright.server.wire import FRONT_BITS, Submit, WireError

LOGPROBS = st.builds(
    TokenLogprobs,
    token_id=st.integers(0, 2**31 - 1),
    logprob=st.floats(allow_nan=False),
    rank=st.integers(1, 2**31 - 1),
    top=st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(allow_nan=False)), max_size=3).map(tuple),
)
ROW = st.tuples(
    st.integers(0, 2**62),
    st.lists(st.integers(0, 2**31 - 1), max_size=4),
    st.none()
    | st.builds(
        Note,
        row=st.just(0),
        finish_reason=st.sampled_from(wire.REASONS),
        stop_reason=st.none() | st.integers(0, 2**31 - 1),
        error=st.none() | st.text(max_size=9),
        retry_after_s=st.none() | st.floats(0, 60),
        cached_tokens=st.none() | st.integers(0, 10**6),
        logprobs=st.lists(LOGPROBS, max_size=2).map(tuple),
        prompt_logprobs=st.none() | st.lists(LOGPROBS, max_size=2).map(tuple),
    ),
)


def made(rows: list[Any]) -> StepDeltas:
    step = StepRows()
    for stream, tokens, note in rows:
        row = step.add(stream, *tokens)
        if note is not None:
            step.note(note._replace(row=row))
    return step.take()


def plain(step: StepDeltas) -> tuple[Any, ...]:
    return step.streams.tolist(), step.counts.tolist(), step.tokens.tolist(), step.notes


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no fault of the wire
@given(rows=st.lists(ROW, max_size=6), number=st.integers(0, 2**40))
def test_a_step_comes_out_as_it_went_in(rows: list[Any], number: int) -> None:
    step = made(rows)
    found_number, found = wire.read_step(wire.unpack(wire.pack_step(number, step)))
    assert found_number == number
    assert plain(found) == plain(step)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is no fault of the wire
@given(rows=st.lists(ROW, max_size=8), data=st.data())
def test_rows_of_a_step_are_a_step_of_these_rows(rows: list[Any], data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.integers(0, max(0, len(rows) - 1)), unique=True, max_size=len(rows)).map(sorted))
    assert plain(made(rows).of(np.array(chosen, int))) == plain(made([rows[i] for i in chosen]))


PARAMS = (
    SamplingParams(),
    SamplingParams(max_tokens=7, temperature=0.5, stop=("a", "bc"), stop_token_ids=(3, 4), seed=-5, n=3, ignore_eos=True),
    SamplingParams(logit_bias={5: 1.5, 6: -100}, allowed_token_ids=(1, 2), logprobs=0, prompt_logprobs=3, priority=9),
    SamplingParams(max_tokens=50, grammar=Grammar("regex", "[a-z]+", ((1, 2), (3,))), special_tokens=True, top_p=0.25),
)


def test_submissions_come_out_as_they_went_in() -> None:
    streams = [list(range(i, i + params.n)) for i, params in enumerate(PARAMS)]
    prompts = [list(range(i)) for i in range(len(PARAMS))]
    submit = Submit(4, [f"r-{i}" for i in range(len(PARAMS))], prompts, list(PARAMS), streams, 1.5)
    assert wire.read_submit(wire.unpack(wire.pack_submit(submit))) == submit


@pytest.mark.parametrize("types", [None, (0, 0, 1)], ids=["alone", "pair"])
def test_passes_and_tables_come_out_as_they_went_in(types: tuple[int, ...] | None) -> None:
    work = Pass((Text((1, 2, 3), types), Text((4,), None)), labels=types is not None, dimensions=5)
    number, found = wire.read_pass(wire.unpack(wire.pack_pass(3, work)))
    assert (number, found.labels, found.dimensions) == (3, work.labels, 5)
    assert [(tuple(t.ids), t.types and tuple(t.types)) for t in found.texts] == [tuple(t) for t in work.texts]
    table = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert (wire.read_table(wire.unpack(wire.pack("answer", 1, wire.write_table(table)))[2]) == table).all()
    for wrong in (None, [2, 3], [2, 3, bytes(20)], [-1, -6, bytes(24)], [2, 3, bytes(23)]):
        with pytest.raises(WireError):
            wire.read_table(wrong)


STEP = msgpack.unpackb(wire.pack_step(1, made([(1, [2], Note(0, "stop"))])))
SUBMIT = msgpack.unpackb(wire.pack_submit(Submit(1, ["a"], [[1, 2]], [SamplingParams(max_tokens=3)], [[0]], None)))


def change(message: list[Any], at: int, value: Any) -> list[Any]:
    return [*message[:at], value, *message[at + 1 :]]


WRONG = {
    "no msgpack": b"\xc1",
    "cut": msgpack.packb(STEP)[:-1],
    "two values": msgpack.packb(STEP) + b"\x01",
    "nested": b"\x91" * 5000 + b"\x01",
    "no list": msgpack.packb({"step": 1}),
    "empty": msgpack.packb([]),
    "an extension": msgpack.packb(["step", msgpack.ExtType(4, b"os.system")]),
    "more counts": msgpack.packb(change(STEP, 3, bytes(8))),
    "a negative count": msgpack.packb(change(STEP, 3, np.array([-1], "<i4").tobytes())),
    "half a token": msgpack.packb(change(STEP, 4, b"123")),
    "a note of another row": msgpack.packb(change(STEP, 5, [change(STEP[5][0], 0, 7)])),
    "an end of another kind": msgpack.packb(change(STEP, 5, [change(STEP[5][0], 1, "whim")])),
    "a note that is none": msgpack.packb(change(STEP, 5, [4])),
    "log-probabilities of half a token": msgpack.packb(change(STEP, 5, [change(STEP[5][0], 6, b"1234")])),
    "alternatives beyond the end": msgpack.packb(
        change(STEP, 5, [change(STEP[5][0], 6, np.array([(1, 1, 0.0, 9)], wire._ENTRY).tobytes())])
    ),
    "more ids": msgpack.packb(change(SUBMIT, 2, ["a", "b"])),
    "no ids": msgpack.packb(["submit", 1, [], [], [], [], None]),
    "a prompt as text": msgpack.packb(change(SUBMIT, 3, ["abc"])),
    "a stream of another front": msgpack.packb(change(SUBMIT, 5, [[1 << FRONT_BITS]])),
    "a parameter that there is not": msgpack.packb(change(SUBMIT, 4, [{"__class__": 1}])),
    "a parameter of another type": msgpack.packb(change(SUBMIT, 4, [{"ignore_eos": "yes"}])),
    "a grammar that is none": msgpack.packb(change(SUBMIT, 4, [{"grammar": ["regex"]}])),
    "a pass of nothing": msgpack.packb(["pass", 1, [], [], False, None]),
    "a pass with a text that is none": msgpack.packb(["pass", 1, ["ab"], [None], False, None]),
    "a pass with other types": msgpack.packb(["pass", 1, [bytes(8)], [bytes(4)], True, None]),
    "true for a number": msgpack.packb(change(SUBMIT, 4, [{"max_tokens": True}])),
}


@pytest.mark.parametrize("raw", WRONG.values(), ids=WRONG)
def test_what_is_no_message_is_refused(raw: bytes) -> None:
    with pytest.raises(WireError):
        read_any(raw)


def read_any(raw: bytes) -> None:
    message = wire.unpack(raw)
    if message[0] == "step":
        wire.read_step(message)
    elif message[0] == "pass":
        wire.read_pass(message)
    else:
        wire.read_submit(message)


def damaged(rng: random.Random, raw: bytes) -> bytes:
    kind = rng.randrange(4)
    if kind == 0:
        return raw[: rng.randrange(len(raw))]
    if kind == 1:
        at = rng.randrange(len(raw))
        return raw[:at] + rng.randbytes(rng.randrange(1, 5)) + raw[at + rng.randrange(3) :]
    if kind == 2:
        return rng.randbytes(rng.randrange(40))
    value = msgpack.unpackb(raw)
    at = rng.randrange(len(value))
    odd = (None, True, -1, 2**63, "", "x" * 300, b"", b"\xff" * 9, [], [[]], {}, {"a": 1}, 1e308, float("nan"))
    return msgpack.packb(change(value, at, rng.choice(odd)))


def test_damaged_messages_raise_nothing_else() -> None:
    rng = random.Random(5)
    submits = [wire.pack_submit(Submit(1, ["a"], [[1]], [params], [[0]], 1.0)) for params in PARAMS]
    sources = [msgpack.packb(STEP), msgpack.packb(SUBMIT), *submits]
    refused = 0
    for _ in range(4000):
        try:
            read_any(damaged(rng, rng.choice(sources)))
        except ValueError as error:  # a WireError, or a parameter out of its range: a 400
            refused += isinstance(error, WireError)
    assert refused > 3000


# A live engine -----------------------------------------------------------------------------------------------------------


@contextmanager
def dealer(address: str) -> Iterator[zmq.Socket]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, 10_000)
        socket.connect(address)
        yield socket


@pytest.fixture
def served(_one_shape: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(fake_engine, "shape_now", "process")
    with running(fake_engine.fake_engine(delay_s=0.002)) as server:
        yield server


def test_a_stream_beside_hostile_messages(served: Any) -> None:
    """Fronts that talk nonsense are sent away, one after the other; a stream of another front goes on to its end."""
    rng = random.Random(6)
    hello, submit = msgpack.packb(["hello", wire.WIRE_VERSION]), msgpack.packb(SUBMIT)
    body = {"prompt": "ab", "max_tokens": 100, "temperature": 0}
    kinds = [
        submit, msgpack.packb(["look", 1, "scrape"]), msgpack.packb(["grammar", 1, ["regex", "a", []]]),
        msgpack.packb(["stop", [1, 2**62]]), msgpack.packb(["abort", ["a"]]), msgpack.packb(["counts", {"a": 1}, {}]),
    ]  # fmt: skip
    for turn in range(8):
        with ExitStack() as stack:
            others = [stack.enter_context(dealer(served.address)) for _ in range(4)]
            for other in others:
                if rng.random() < 0.8:
                    other.send(hello)
                for _ in range(30):
                    if rng.random() < 0.1:
                        other.send_multipart([submit] * rng.randrange(2, 4))
                    other.send(damaged(rng, rng.choice(kinds)))
            answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=60)
            assert answer.json()["choices"][0]["text"] == ALPHABET_TEXT[:100], turn
    assert httpx.get(f"{served.url}/health").status_code == 200
    served.until_idle()


def test_another_version_is_said_so(served: Any) -> None:
    with dealer(served.address) as socket:
        socket.send(wire.pack("hello", wire.WIRE_VERSION + 1))
        assert wire.unpack(socket.recv())[:2] == ["hello", wire.WIRE_VERSION], "the front can tell what it speaks"
        socket.send(wire.pack("look", 1, "scrape"))
        assert wire.unpack(socket.recv())[0] == "lost", "and is not served"


def test_a_front_of_another_version_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fake_engine.fake_engine()
    with behind_a_socket(engine, Served.of(engine, "letters")) as (_, address):
        assert ask_for_served(address, 10).name == "letters"
        monkeypatch.setattr("tilewright.server.remote.WIRE_VERSION", 99)
        with pytest.raises(ValueError, match=r"uses version 2 .* this process uses version 99"):
            ask_for_served(address, 10)


def test_an_engine_that_is_not_there(tmp_path: Path) -> None:
    started_s = time.monotonic()
    with pytest.raises(TimeoutError, match=r"does not answer within 0\.2 s"):
        ask_for_served(wire.address_of(tmp_path), 0.2)
    assert time.monotonic() - started_s < 10


def test_a_front_that_does_not_read_is_given_up(served: Any) -> None:
    """Its requests are aborted and their pages freed; what waits for it is bounded, and nobody else feels it."""
    with dealer(served.address) as socket:
        socket.setsockopt(zmq.RCVHWM, 1)
        socket.send(wire.pack("hello", wire.WIRE_VERSION))
        assert wire.unpack(socket.recv())[0] == "hello"
        for i in range(6):
            params = [SamplingParams(max_tokens=120, prompt_logprobs=20, logprobs=20, ignore_eos=True)]
            socket.send(wire.pack_submit(Submit(i, [f"deaf-{i}"], [[97] * 3], params, [[i]], None)))
        until(lambda: served.engine.stats().running > 0)
        for i in range(100_000):  # answers that nobody takes
            if len(served.process._fronts) == 1:
                break
            try:
                socket.send(wire.pack("look", i, "scrape"), zmq.NOBLOCK)
            except zmq.Again:
                time.sleep(0.002)
        assert len(served.process._fronts) == 1, "the other front is still there, and no more"
        assert httpx.get(f"{served.url}/health").status_code == 200
        body = {"prompt": "ab", "max_tokens": 100, "temperature": 0}
        answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=60)
        assert answer.json()["choices"][0]["text"] == ALPHABET_TEXT[:100]
    served.until_idle()
