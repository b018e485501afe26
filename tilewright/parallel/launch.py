"""Starts the ranks of a run on one machine, and ends all of them if one fails."""

import signal
import subprocess
import time
from collections.abc import Callable, Sequence

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from tilewright.hw.env import Launched, variables_of_rank

__all__ = ["how_it_ended", "run_ranks"]

_GRACE_S = 10.0


def run_ranks(command: Sequence[str], ranks: int, say: Callable[[str], None]) -> None:
    """Run a command once for each rank, with torchrun's environment variables, and wait until all have ended.

    Raises:
        ChildProcessError: a rank failed, and the others were ended. The message names the failed rank.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    places = [Launched(rank=r, world=ranks, local_rank=r, address="127.0.0.1", port=store.port) for r in range(ranks)]
    started: list[subprocess.Popen[bytes]] = []
    try:
        started += [subprocess.Popen(command, env=variables_of_rank(place)) for place in places]
        words = _first_failure(started)
        if words is not None:
            say(f"{words}; ending the others")
            raise ChildProcessError(
                f"{words}, and the other ranks were ended; run the same command again to continue from the last checkpoint"
            )
    finally:
        _end(started)


def how_it_ended(code: int) -> str:
    """How a process ended, as text: its exit code, or the signal that ended it."""
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _first_failure(started: Sequence[subprocess.Popen[bytes]]) -> str | None:
    while True:
        codes = [process.poll() for process in started]
        for rank, code in enumerate(codes):
            if code:
                return f"rank {rank} of {len(started)} {how_it_ended(code)}"
        if all(code == 0 for code in codes):
            return None
        time.sleep(0.1)


def _end(started: Sequence[subprocess.Popen[bytes]]) -> None:
    alive = [process for process in started if process.poll() is None]
    for process in alive:
        process.terminate()
    deadline = time.monotonic() + _GRACE_S
    for process in alive:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
