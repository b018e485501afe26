"""Incremental parsing of text that arrives in pieces. Parsers are generators and need not know where the text was cut.

A parser is a generator over a `Reader`. It calls the reader's methods (`until`, `json_value` ...). If the text so far is not
sufficient, these wait for more text with a bare `yield`. The result depends only on the characters, not on the pieces, so it is
the same however the text is cut. The reader keeps back only text that could still become a mark, so the time is linear in the
length of the text.
"""

import re
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple, TypeVar

__all__ = ["Event", "Out", "Parse", "Parser", "Reader", "Take"]

T = TypeVar("T")
Parse = Generator[None, None, T]
"""The type of a parsing function: it yields to wait for more text, and returns its result."""
Take = Callable[[str], object]
_STRUCTURE = re.compile(r'["{}\[\]]|[^"{}\[\]\s0-9A-Za-z+\-.,:]')
_STRING = re.compile(r'["\\]')
_SCALAR_END = re.compile(r"[^0-9A-Za-z+\-.]")


class Event(NamedTuple):
    """A part of an answer. The joined parts of one kind (and call) are the whole text of that kind."""

    kind: str
    """content, reasoning, call (`text` is the function's name) or arguments."""
    text: str
    call: int = 0
    """The index of the call, from 0, for the kinds call and arguments."""


class Out:
    """Receives the results of parsers and makes events from them.

    White space between text and a call, and at the beginning of content after reasoning, is dropped.
    """

    def __init__(self, *, most_calls: int | None = None):
        self._most_calls = most_calls
        self._events: list[Event] = []
        self._space: list[str] = []
        self._said = self._reasoned = False
        self.calls = 0

    def content(self, text: str) -> None:
        """Add text of the answer's content."""
        if self._reasoned and not self._said:
            text = text.lstrip()
        shown = text.rstrip()
        if shown:
            self._said = True
            self._add("content", "".join(self._space) + shown)
            self._space = []
        if len(shown) < len(text):
            self._space.append(text[len(shown) :])

    def reasoning(self, text: str) -> None:
        """Add a piece of the reasoning."""
        self._reasoned = True
        if text:
            self._add("reasoning", text)

    def call(self, name: str) -> Take:
        """Begin a call. Returns a function that takes the text of its arguments."""
        self._space = []
        index, self.calls = self.calls, self.calls + 1
        if self._most_calls is not None and index >= self._most_calls:
            return lambda text: None
        self._add("call", name, index)
        return lambda text: self._add("arguments", text, index) if text else None

    def finish(self) -> None:
        """Called at the end of the text."""
        if self._space and not self.calls:
            self._add("content", "".join(self._space))
        self._space = []

    def take(self) -> list[Event]:
        """The events since the last call of this method. Neighbouring events of the same kind are joined."""
        events, self._events = self._events, []
        joined: list[Event] = []
        parts: list[str] = []
        for event in events:
            if joined and event.kind != "call" and (event.kind, event.call) == (joined[-1].kind, joined[-1].call):
                parts.append(event.text)
                continue
            if parts:
                joined[-1] = joined[-1]._replace(text="".join(parts))
            joined.append(event)
            parts = [event.text]
        if parts:
            joined[-1] = joined[-1]._replace(text="".join(parts))
        return joined

    def _add(self, kind: str, text: str, call: int = 0) -> None:
        self._events.append(Event(kind, text, call))


class Reader:
    """The text of an answer from the current position on."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self.ended = False

    def feed(self, text: str) -> None:
        """Append text."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def take(self, count: int) -> str:
        """Consume this many characters and return them. They must have arrived."""
        self._at += count
        return self._text[self._at - count : self._at]

    def back(self, text: str) -> None:
        """Put back `text`, which was just consumed."""
        self._text, self._at = text + self._text[self._at :], 0

    def ahead(self, count: int) -> Parse[str]:
        """The next `count` characters, without consuming them. Fewer only at the end of the text."""
        while len(self._text) - self._at < count and not self.ended:
            yield
        return self._text[self._at : self._at + count]

    def comes(self, mark: str) -> Parse[bool]:
        """Whether `mark` comes next. If so, it is consumed. Waits only for as many characters as are needed to decide."""
        count = 1
        while True:
            seen = yield from self.ahead(count)
            if seen == mark:
                self.take(count)
                return True
            if len(seen) < count or not mark.startswith(seen):
                return False
            count += 1

    def space(self, to: Take = lambda text: None) -> Parse[str]:
        """Consume white space. Returns the character after it (not consumed), or "" at the end of the text."""
        while True:
            char = yield from self.ahead(1)
            if not char or not char.isspace():
                return char
            to(self.take(1))

    def until(self, *marks: str, to: Take, stay: bool = False) -> Parse[str | None]:
        """Pass the text before the first of the marks to `to`, and consume the mark. Returns the mark; None if none comes.

        No mark may begin with another mark. With `stay` the mark is not consumed.
        """
        pattern = re.compile("|".join(map(re.escape, marks)))
        while True:
            found = pattern.search(self._text, self._at)
            if found is not None:
                to(self.take(found.start() - self._at))
                if not stay:
                    self.take(len(found[0]))
                return found[0]
            held = 0 if self.ended else _held(self._text, self._at, marks)
            if len(self._text) - self._at > held:
                to(self.take(len(self._text) - self._at - held))
            if self.ended:
                return None
            yield

    def json_string(self, to: Take) -> Parse[bool]:
        """Pass a JSON string, as it is written and with its quotes, to `to`. The next character must be the opening quote.

        Returns False if the string has no end.
        """
        to(self.take(1))
        while True:
            found = _STRING.search(self._text, self._at)
            if found is None:
                if len(self._text) > self._at:
                    to(self.take(len(self._text) - self._at))
                if self.ended:
                    return False
                yield
            elif found[0] == '"':
                to(self.take(found.end() - self._at))
                return True
            else:
                to(self.take(found.start() - self._at))
                pair = yield from self.ahead(2)
                to(self.take(len(pair)))

    def json_value(self, to: Take, *, depth: int = 0) -> Parse[bool]:
        """Pass a JSON value, as it is written, to `to`, up to the first character that cannot belong to it.

        Returns False if it is not a JSON value or has no end. `depth`: the number of brackets that are already open, if the
        beginning of the value has been consumed.
        """
        if depth == 0:
            first = yield from self.space()
            if first == '"':
                return (yield from self.json_string(to))
            if first not in ("{", "["):
                return (yield from self._scalar(to))
        while True:
            found = _STRUCTURE.search(self._text, self._at)
            if found is None:
                if len(self._text) > self._at:
                    to(self.take(len(self._text) - self._at))
                if self.ended:
                    return False
                yield
                continue
            to(self.take(found.start() - self._at))
            if found[0] == '"':
                if not (yield from self.json_string(to)):
                    return False
            elif found[0] in "{[":
                depth += 1
                to(self.take(1))
            elif found[0] in "}]":
                depth -= 1
                to(self.take(1))
                if depth == 0:
                    return True
            else:
                return False

    def _scalar(self, to: Take) -> Parse[bool]:
        any_taken = False
        while True:
            found = _SCALAR_END.search(self._text, self._at)
            stop = len(self._text) if found is None else found.start()
            if stop > self._at:
                any_taken = True
                to(self.take(stop - self._at))
            if found is not None or self.ended:
                return any_taken and found is not None
            yield


def _held(text: str, at: int, marks: Sequence[str]) -> int:
    """How many characters at the end of text[at:] could be the beginning of a mark."""
    longest = max(map(len, marks)) - 1
    for start in range(max(at, len(text) - longest), len(text)):
        if any(mark.startswith(text[start:]) for mark in marks):
            return len(text) - start
    return 0


class Parser:
    """Parses one answer: takes pieces of text and returns events. `read` is the parser that runs over the reader."""

    def __init__(self, read: Callable[[Reader, Out], Parse[None]], *, most_calls: int | None = None):
        self._reader, self._out = Reader(), Out(most_calls=most_calls)
        self._run: Parse[None] | None = read(self._reader, self._out)

    @property
    def calls(self) -> int:
        """Number of calls that have begun."""
        return self._out.calls

    def push(self, text: str) -> list[Event]:
        """Parse a piece of text. Returns the new events."""
        if text and self._run is not None:
            self._reader.feed(text)
            self._go_on()
        return self._out.take()

    def finish(self) -> list[Event]:
        """End the text. Returns the events of the text that was held back."""
        self._reader.ended = True
        self._go_on()
        self._out.finish()
        return self._out.take()

    def _go_on(self) -> None:
        if self._run is not None:
            try:
                next(self._run)
            except StopIteration:
                self._run = None
