"""Separates reasoning from the answer. It is marked by `<think>`, or by the channels of harmony (gpt-oss), which also contain
calls."""

import re
from collections.abc import Callable

from tilewright.server.tools.reader import Out, Parse, Reader

__all__ = ["CLOSE", "FINAL", "harmony", "plain", "thinking"]

OPEN, CLOSE, CALL = "<think>", "</think>", "<tool_call>"
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


def plain(reader: Reader, out: Out) -> Parse[None]:
    """The whole text is content."""
    yield from reader.until("\0\0", to=out.content)


def thinking(
    rest: Callable[[Reader, Out], Parse[None]], *, open_already: bool = False, call: str | None = None
) -> Callable[[Reader, Out], Parse[None]]:
    """Text between `<think>` and `</think>` at the beginning is reasoning; `rest` parses the text after it.

    Args:
        open_already: the prompt ends with `<think>`; the answer may repeat it.
        call: the text directly after `<tool_call>` in a call. A call ends the reasoning too, because some models omit
            `</think>`. None: only `</think>` ends it.
    """

    def read(reader: Reader, out: Out) -> Parse[None]:
        space: list[str] = []
        yield from reader.space(space.append)
        if (yield from reader.comes(OPEN)) or open_already:
            yield from _trimmed(reader, out, call)
            yield from reader.space()
        else:
            out.content("".join(space))
        yield from rest(reader, out)

    return read


def _trimmed(reader: Reader, out: Out, call: str | None) -> Parse[None]:
    """Parse the reasoning up to its end, without the white space at its beginning and end."""
    held: list[str] = []

    def take(text: str) -> None:
        shown = text.rstrip()
        if shown:
            out.reasoning("".join(held) + shown)
            held.clear()
        held.append(text[len(shown) :])

    yield from reader.space()
    marks = (CLOSE,) if call is None else (CLOSE, CALL)
    while (mark := (yield from reader.until(*marks, to=take))) == CALL:
        space: list[str] = []
        yield from reader.space(space.append)
        before = mark + "".join(space)
        if call is not None and (yield from reader.comes(call)):
            reader.back(before + call)
            return
        take(before)
    if mark is None:
        out.reasoning("".join(held))


START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
FINAL = "<|channel|>final<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")


def harmony(reader: Reader, out: Out) -> Parse[None]:
    """Messages with a header that names the channel and the recipient. The channel "analysis" is reasoning; a message to a
    function is a call.

    The prompt ends within the first header, after `<|start|>assistant`. Text without any header is content.
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
    # A message to a built-in tool, such as python, counts as reasoning: no client could answer it.
    return out.reasoning if recipient is not None or channel[:1] == ["analysis"] else out.content
