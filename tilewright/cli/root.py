"""The root of the command line: global options, error and progress messages, and exit codes.

Exit codes: 0 success, 1 failure (one line on stderr says what failed, what was given, what was wanted and what to do), 2 wrong
usage,
130 Ctrl-C, 143 SIGTERM. Results go to stdout, everything else to stderr. `--traceback` shows where an error
came from.
"""

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from types import FrameType
from typing import Annotated

import typer

from tilewright import __version__
from tilewright.extras import MissingExtra

__all__ = ["INTERRUPTED", "TERMINATED", "Progress", "app", "ends_at_once", "ends_on_sigterm", "plain_errors", "say"]

INTERRUPTED = 128 + signal.SIGINT
"""Exit code after Ctrl-C, as shells count."""
TERMINATED = 128 + signal.SIGTERM

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="GPU operators you can prove, and the engine that serves language models on them.",
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"tilewright {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="print the version", is_eager=True, callback=_version)] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="show the Python traceback of an error")] = False,
) -> None:
    context.obj = traceback


@contextmanager
def plain_errors(context: typer.Context) -> Iterator[None]:
    """Turn what a user can cause into one line on stderr and exit code 1; leave bugs their traceback."""
    try:
        yield
    except KeyboardInterrupt:
        say("interrupted")
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        # The reader of stdout has gone (`| head`); Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None
    except (ValueError, OSError, MemoryError, MissingExtra) as error:
        if context.obj:
            raise
        say(f"error: {str(error).strip() or type(error).__name__}")
        raise typer.Exit(1) from None


@contextmanager
def ends_at_once(number: signal.Signals) -> Iterator[None]:
    """SIGTERM or SIGINT ends the process inside: one line, exit code 143 or 130.

    On the spot, because an exception would not do: whatever runs may swallow it (torch, while it is imported, does). And not
    the system's own way, which spares the first process of a container.
    """
    word, code = (b"interrupted\n", INTERRUPTED) if number == signal.SIGINT else (b"terminated\n", TERMINATED)

    def end(caught: int, frame: FrameType | None) -> None:
        with suppress(OSError):
            os.write(2, b"\r\x1b[2K" + word if os.isatty(2) else word)
        os._exit(code)

    before = signal.signal(number, end)
    try:
        yield
    finally:
        signal.signal(number, before)


def ends_on_sigterm() -> AbstractContextManager[None]:
    """SIGTERM ends the process inside at once, with exit code 143."""
    return ends_at_once(signal.SIGTERM)


def say(line: str) -> None:
    """A line on stderr, if there is one to write to: a command must not fail for want of a reader."""
    with suppress(OSError, ValueError):  # a full disk, a closed pipe, a closed file
        if sys.stderr is not None:
            print(line, file=sys.stderr, flush=True)


class Progress:
    """Words of a long task on stderr: on a terminal the line is written over, elsewhere only each new stage is a line."""

    def __init__(self, say: Callable[[str], None] = say) -> None:
        self._terminal = sys.stderr is not None and sys.stderr.isatty()
        self._say = say
        self._stage = ""

    def __call__(self, words: str) -> None:
        """Say where the task is."""
        stage = re.sub(r"[\d,.%/ ]+$", "", words)
        if self._terminal and "\n" not in words:
            print(f"\r\x1b[2K{words}", end="", file=sys.stderr, flush=True)
        elif stage != self._stage:
            self._say(words)
        self._stage = stage

    def end(self) -> None:
        """The task is over: its line is cleared."""
        if self._terminal:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
