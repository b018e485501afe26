"""Reasoning apart from the answer: `<think>` around it, or harmony's channels (gpt-oss), which carry calls as well."""

import re
from collections.abc import Callable

from tilewright.server.tools.reader import Out, Parse, Reader

__all__ = ["CLOSE", "FINAL", "harmony", "plain", "thinking"]

OPEN, CLOSE = "<think>", "</think>"
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


def plain(reader: Reader, out: Out) -> Parse[None]:
    """All of it is content."""
    yield from reader.until("\0\0", to=out.content)


def thinking(
    rest: Callable[[Reader, Out], Parse[None]], *, open_already: bool = False, close: str = CLOSE
) -> Callable[[Reader, Out], Parse[None]]:
    """What stands between `<think>` and `</think>` at the beginning is reasoning, `rest` reads what comes behind.

    open_already: the prompt ends with `<think>`; the answer may repeat it.
    """

    def read(reader: Reader, out: Out) -> Parse[None]:
        space: list[str] = []
        yield from reader.space(space.append)
        if (yield from reader.comes(OPEN)) or open_already:
            yield from _trimmed(reader, out, close)
            yield from reader.space()
        else:
            out.content("".join(space))
        yield from rest(reader, out)

    return read


def _trimmed(reader: Reader, out: Out, close: str) -> Parse[None]:
    """Reasoning up to its end, without white space at either end of it."""
    held: list[str] = []

    def take(text: str) -> None:
        shown = text.rstrip()
        if shown:
            out.reasoning("".join(held) + shown)
            held.clear()
        held.append(text[len(shown) :])

    yield from reader.space()
    if (yield from reader.until(close, to=take)) is None:
        out.reasoning("".join(held))


START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
FINAL = "<|channel|>final<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")


def harmony(reader: Reader, out: Out) -> Parse[None]:
    """Messages with a header: their channel, and to whom. analysis is reasoning, what goes to a function is a call.

    The prompt ends within the first header, behind `<|start|>assistant`. Text without any header is content.
    """
    addressed = " to="
    if (yield from reader.comes(addressed)):
        mark: str | None = START
    else:
        addressed, mark = "", (yield from reader.until(START, CHANNEL, *ENDS, to=out.content))
    while mark is not None:
        if mark in ENDS:
            mark = yield from reader.until(START, CHANNEL, to=lambda text: None)
            continue
        header = [addressed, CHANNEL if mark == CHANNEL else ""]
        addressed = ""
        if (yield from reader.until(MESSAGE, to=header.append)) is None:
            return
        mark = yield from reader.until(START, *ENDS, to=_taker("".join(header), out))


def _taker(header: str, out: Out) -> Callable[[str], object]:
    recipient = _RECIPIENT.search(header)
    if recipient is not None and recipient[1].startswith("functions."):
        return out.call(recipient[1].removeprefix("functions."))
    channel = header.partition(CHANNEL)[2].split()
    # What goes to a built-in tool, such as python, is part of the thoughts: no client could answer it.
    return out.reasoning if recipient is not None or channel[:1] == ["analysis"] else out.content
