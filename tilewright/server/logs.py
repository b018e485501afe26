"""The log of a serving process: lines on stderr. Logging never raises and never blocks a request. Lines never contain the text
of a request or an answer.

Lines go through a bounded queue to a thread of their own, which writes them to the descriptor, several at a time. It collects
lines for `PAUSE_S`, because each time it wakes up, other threads have to wait for Python's lock.

If the reader of the log has gone, or its disk is full, lines are lost. If the reader only pauses, up to `QUEUE_LINES` lines
wait and later ones are dropped and counted. When writing works again, a line such as "27 lines of the log were lost" follows.
The server continues in each case.

A line is text for people or, with `format="json"`, one object: time, level, logger, message, and the fields of a request.
"""

import datetime
import json
import logging
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import TracebackType
from typing import Any

__all__ = ["FIELDS", "Log", "request_line"]

QUEUE_LINES = 10_000
PAUSE_S = 0.05
TOGETHER_LINES = 256
FLUSH_TIMEOUT_S = 1.0
"""How long the end of the process waits for lines that are still queued."""
FIELDS = "fields"
"""The attribute of a log record that holds the fields of a request: `logger.info(..., extra={FIELDS: {...}})`."""


class Log:
    """While it is entered, it writes all messages of `logging` from `level` upwards, and the lines passed to `say`.

    Args:
        level: least level for tilewright's own loggers, as `ServerConfig.log_level`; for other libraries, warning at least.
        format: "text" or "json".
        descriptor: the file descriptor for the lines; 2 is stderr.
    """

    def __init__(self, level: str = "info", format: str = "text", descriptor: int = 2):
        self._level = level.upper()
        self._formatter = _Json() if format == "json" else _Text()
        self._writer = _Writer(descriptor)
        self._handler = _Handler(self._writer, self._formatter)
        self._stage = ""
        self.staged: Callable[[str], None] | None = None
        """Told stages of one line, which then are not written: another process says them."""

    def __enter__(self) -> "Log":
        self._writer.start()
        root = logging.getLogger()
        self._before = (root.level, list(root.handlers), logging.getLogger("tilewright").level, logging.raiseExceptions)
        root.handlers[:] = [self._handler]
        root.setLevel(max(logging.WARNING, logging.getLevelName(self._level)))
        logging.getLogger("tilewright").setLevel(self._level)
        logging.raiseExceptions = False
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        level, handlers, ours, logging.raiseExceptions = self._before
        root = logging.getLogger()
        root.handlers[:] = handlers
        root.setLevel(level)
        logging.getLogger("tilewright").setLevel(ours)
        self.close()

    def close(self) -> None:
        """Wait up to `FLUSH_TIMEOUT_S` until the lines are written. Later lines are lost."""
        self._writer.close()

    def stage(self, words: str) -> None:
        """Report the progress of a long task. Writes a line for each new stage, but not if only the numbers in it change."""
        if self.staged is not None and "\n" not in words:
            self.staged(words)
            return
        stage = re.sub(r"[\d,.%/ ]+$", "", words)
        if stage != self._stage:
            self.say(words)
        self._stage = stage

    def say(self, line: str) -> None:
        """Write a line for the operator at every log level, such as where the server listens or why it ends."""
        record = logging.LogRecord("tilewright.server", logging.INFO, __file__, 0, line, None, None)
        self._writer.write(line if isinstance(self._formatter, _Text) else self._formatter.format(record))


def request_line(logger: logging.Logger, level: int, message: str, fields: dict[str, Any]) -> None:
    """Like `logger.log(level, message, extra={FIELDS: fields})`, but without a `LogRecord` if only the `Log` would see it.

    There is one such line per request. Creating and formatting a record takes longer than all other work for the line.
    """
    if not logger.isEnabledFor(level):
        return
    handler = _only_handler(logger)
    if handler is None:
        logger.log(level, "%s", message, extra={FIELDS: fields})
    else:
        handler.write(time.time(), level, logger.name, message, fields)


def _only_handler(logger: logging.Logger) -> "_Handler | None":
    """The handler of the entered `Log`; None if other handlers would see a record too, or a filter might drop or change it."""
    if logger.filters:
        return None
    at = logger
    while at.propagate and at.parent is not None:
        if at.handlers:
            return None
        at = at.parent
    only = at.handlers[0] if len(at.handlers) == 1 else None
    return only if isinstance(only, _Handler) and not only.filters else None


class _Handler(logging.Handler):
    def __init__(self, writer: "_Writer", formatter: "_Text | _Json"):
        super().__init__()
        self._writer, self._own = writer, formatter
        self.setFormatter(formatter)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except (TypeError, ValueError) as error:  # the message does not fit its arguments: a bug that must not fail a request
            line = f"a line of {record.name} could not be written: {error}"
        self._writer.write(line)

    def write(self, time_s: float, level: int, name: str, message: str, fields: dict[str, Any]) -> None:
        """Write the line that `emit` would write for a record with these values."""
        if level >= self.level:
            self._writer.write(self._own.line(time_s, logging.getLevelName(level), name, message, fields))


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """`2026-01-31T12:00:00.123Z INFO message`, and a traceback below it."""
        text = self.line(record.created, record.levelname, record.name, record.getMessage(), {})
        return text if record.exc_info is None else f"{text}\n{self.formatException(record.exc_info)}"

    @staticmethod
    def line(time_s: float, level: str, name: str, message: str, fields: dict[str, Any]) -> str:
        """A line, without a traceback."""
        return f"{_time(time_s)} {level} {message}"


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """One object in one line."""
        fields = getattr(record, FIELDS, {})
        if record.exc_info is not None:
            fields = {**fields, "traceback": self.formatException(record.exc_info)}
        return self.line(record.created, record.levelname, record.name, record.getMessage(), fields)

    @staticmethod
    def line(time_s: float, level: str, name: str, message: str, fields: dict[str, Any]) -> str:
        """A line with the JSON object of these fields."""
        entry = {"time": _time(time_s), "level": level.lower(), "logger": name, "message": message, **fields}
        return json.dumps(entry, default=str)


def _time(time_s: float) -> str:
    """As in RFC 3339, in UTC, with milliseconds."""
    second, us = divmod(round(1e6 * time_s), 1_000_000)
    return f"{_second(second)}.{us // 1000:03d}Z"


@lru_cache(maxsize=2)
def _second(second: int) -> str:
    """A time without its milliseconds. It is cached, because it is the same for many lines."""
    return datetime.datetime.fromtimestamp(second, datetime.UTC).isoformat().removesuffix("+00:00")


class _Writer:
    """Writes lines to a descriptor from a thread of its own."""

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._lost = 0
        self._closing = threading.Event()
        # A daemon thread: at the end of the process it may still be blocked in a write, if the reader does not read.
        self._thread = threading.Thread(target=self._run, name="tilewright-log", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def write(self, line: str) -> None:
        """Queue a line. It is dropped if the queue is full."""
        if self._lines.qsize() < QUEUE_LINES:
            self._lines.put(line)
        else:
            self._lost += 1

    def close(self) -> None:
        """Wait up to `FLUSH_TIMEOUT_S` until the lines are written."""
        end_s = time.monotonic() + FLUSH_TIMEOUT_S
        self._closing.set()
        self._lines.put(None)
        self._thread.join(max(0.0, end_s - time.monotonic()))

    def _run(self) -> None:
        ended = False
        while not ended:
            lines, ended = self._taken()
            lost, self._lost = self._lost, 0
            if lost and not self._put([f"{lost} lines of the log were lost, because the log was written too slowly"]):
                self._lost += lost
            if not self._put(lines):
                self._lost += len(lines)
            self._closing.wait(PAUSE_S)

    def _taken(self) -> tuple[list[str], bool]:
        """Wait for lines. Returns (the next lines, whether the end of the queue was reached)."""
        lines, line = list[str](), self._lines.get()
        while line is not None:
            lines.append(line)
            if len(lines) == TOGETHER_LINES or self._lines.empty():
                return lines, False
            line = self._lines.get_nowait()  # it cannot be empty: only this thread takes lines
        return lines, True

    def _put(self, lines: Sequence[str]) -> bool:
        """Write lines. Returns whether that worked."""
        rest = "".join(f"{line}\n" for line in lines).encode(errors="backslashreplace")
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:  # closed, full, or without a reader
            return False
        return True
