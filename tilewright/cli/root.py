"""The root of the command line: global options, error and progress messages, and exit codes.

Exit codes: 0 success, 1 failure (one line on stderr says what failed, what was given, what was wanted and what to do), 2 wrong
usage, 130 Ctrl-C, 143 SIGTERM. Results go to stdout, everything else to stderr. `--traceback` shows where an error came from.
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
    """Turn errors that a user can cause into one line on stderr and exit code 1. Bugs keep their traceback."""
    try:
        yield
    except KeyboardInterrupt:
        say("interrupted")
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        # The reader of stdout has closed it (`| head`); Python would raise again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None
    except (ValueError, OSError, MemoryError, MissingExtra) as error:
        if context.obj:
            raise
        say(f"error: {str(error).strip() or type(error).__name__}")
        raise typer.Exit(1) from None


@contextmanager
def ends_at_once(number: signal.Signals) -> Iterator[None]:
    """Inside this context, SIGTERM or SIGINT ends the process with one line and exit code 143 or 130.

    The process ends immediately. An exception is not enough: the running code may swallow it, as torch does while it is
    imported. The system's default action is not enough either, because it does not end the first process of a container.
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
    """Inside this context, SIGTERM ends the process immediately with exit code 143."""
    return ends_at_once(signal.SIGTERM)


def say(line: str) -> None:
    """Print a line to stderr. If stderr cannot be written to, the line is dropped: a command must not fail because of it."""
    with suppress(OSError, ValueError):  # a full disk, a closed pipe, a closed file
        if sys.stderr is not None:
            print(line, file=sys.stderr, flush=True)


class Progress:
    """The progress of a long task on stderr: on a terminal one line that is overwritten, elsewhere one line for each stage."""

    def __init__(self, say: Callable[[str], None] = say) -> None:
        self._terminal = sys.stderr is not None and sys.stderr.isatty()
        self._say = say
        self._stage = ""

    def __call__(self, words: str) -> None:
        """Show how far the task is."""
        stage = re.sub(r"[\d,.%/ ]+$", "", words)
        if self._terminal and "\n" not in words:
            print(f"\r\x1b[2K{words}", end="", file=sys.stderr, flush=True)
        elif stage != self._stage:
            self._say(words)
        self._stage = stage

    def end(self) -> None:
        """Clear the line, because the task is over."""
        if self._terminal:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
