"""Compiles an untrusted grammar first in a separate process, where time and memory are bounded.

llguidance counts its own work and nearly always gives up in time. But a bug in the library must not end a server's engine, and
a grammar must not use up the server's memory. A grammar that passes in the child process is compiled again where it is used.
"""

import json
import logging
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from tilewright.engine.grammar import Grammar
from tilewright.engine.grammar_masks import GrammarError, Grammars

__all__ = ["GrammarTrial", "child"]

TRIAL_CPU_S = 5.0
"""Limit on the processor time for one grammar; the largest grammars in use take half a second."""
TRIAL_S = 30.0
"""Limit on the elapsed time; larger than `TRIAL_CPU_S`, because the machine may be busy with other work."""
START_S = 60.0
TRIAL_BYTES = 2 << 30
MAX_TRIALS = 1000
"""Number of grammars that one child compiles before it is replaced, so that nothing accumulates in it."""
UNREADABLE = 1
"""The child's exit code if the library has raised an undocumented exception or has panicked."""
logger = logging.getLogger(__name__)

_CHILD = """
import json, sys
job = json.loads(sys.stdin.readline())
sys.path[:] = job["path"]
from tilewright.engine.grammar_trial import child
child(job)
"""


class GrammarTrial:
    """Tries grammars in a child process, which runs from the first grammar to `close`. Use it in one thread only."""

    def __init__(self, tokenizer_json: str, eos_ids: Sequence[int]):
        self._job = json.dumps({"path": sys.path, "tokenizer": tokenizer_json, "eos": list(eos_ids)})
        self._child: subprocess.Popen[str] | None = None
        self._tried = 0

    def check(self, grammar: Grammar) -> None:
        """Compile a grammar and make its first mask, in the child process.

        If no child can be started, the grammar is not tried, and a warning is logged.

        Raises:
            GrammarError: the grammar is not valid, or needs more than `TRIAL_CPU_S` seconds or `TRIAL_BYTES` bytes.
        """
        child = self._started()
        if child is None:
            return
        answer = self._ask(child, json.dumps([grammar.kind, grammar.source]), TRIAL_S)
        if answer is None:
            code = self.close()
            if code == UNREADABLE:
                raise GrammarError(f"the {grammar.kind} is not valid: its compiler could not read it")
            raise GrammarError(
                f"the {grammar.kind} is too complex: compiling it needs more than {TRIAL_CPU_S:g} s or {TRIAL_BYTES >> 20} MiB"
            )
        self._tried += 1
        if self._tried >= MAX_TRIALS:
            self.close()
        if answer:
            raise GrammarError(answer)

    def close(self) -> int | None:
        """End the child; returns its exit code, or None if there was no child."""
        child, self._child, self._tried = self._child, None, 0
        if child is None:
            return None
        assert child.stdout is not None
        if not select.select([child.stdout], [], [], 0)[0]:  # otherwise it is ending already
            child.kill()
        child.communicate()
        return child.returncode

    def _started(self) -> subprocess.Popen[str] | None:
        if self._child is not None and self._child.poll() is None:
            return self._child
        self.close()
        command = [sys.executable, "-c", _CHILD]
        try:
            child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        except OSError as error:
            logger.warning("a grammar was not tried, as no Python could be started: %s", error)
            return None
        self._child = child
        if self._ask(child, self._job, START_S) != "":
            logger.warning("a grammar was not tried, as the process for it did not start")
            self.close()
            return None
        return child

    def _ask(self, child: "subprocess.Popen[str]", line: str, timeout_s: float) -> str | None:
        """The child's answer; None if it did not arrive in time, or the child has ended."""
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(line + "\n")
            child.stdin.flush()
        except OSError:
            return None
        end_s = time.monotonic() + timeout_s
        if not select.select([child.stdout], [], [], max(0.0, end_s - time.monotonic()))[0]:
            return None
        answer = child.stdout.readline()  # the child writes whole lines
        return json.loads(answer) if answer.endswith("\n") else None


def child(job: dict[str, object]) -> None:
    """The child process: reads one line per grammar and writes one line with the error, or "" if there is none."""
    try:
        import resource
    except ImportError:  # Windows: only the time is bounded
        pass
    else:
        resource.setrlimit(resource.RLIMIT_AS, (TRIAL_BYTES, TRIAL_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    eos = job["eos"]
    assert isinstance(eos, list)
    grammars = Grammars(str(job["tokenizer"]), eos, kept=0, threads=1)
    print(json.dumps(""), flush=True)
    for line in sys.stdin:
        kind, source = json.loads(line)
        _limit(TRIAL_CPU_S)
        try:
            grammars.check(Grammar(kind, source))
            answer = ""
        except ValueError as error:
            answer = str(error)
        except MemoryError:
            sys.exit(UNREADABLE + 1)
        _limit(0.0)
        print(json.dumps(answer), flush=True)


def _limit(seconds: float) -> None:
    """Set the processor time after which a signal ends this process, counted from now; 0: no limit."""
    if hasattr(signal, "setitimer"):  # not on Windows, where the parent's clock is the only bound
        signal.setitimer(signal.ITIMER_PROF, seconds)
