"""The trainer's side of a sampler in a separate process. Calls and answers go through pipes; weights as set by
`config.handover`."""

import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tilewright.rl.config import RLConfig
from tilewright.rl.rollout import Answer

__all__ = ["RemoteSampler"]

_LONGEST_LINE = 1 << 30
_ENDS_S = 10.0


class RemoteSampler:
    """Samples in the same way as `Sampler`, in a process on `device`, with the weights that were transferred last.

    place: where the process finds the weights: a file, or the folder through which the ranks of a broadcast find each other.
    longest: greatest number of tokens in a conversation.
    rank: the rank of this sampler, of `size` ranks.

    Raises:
        ConnectionError: the process ends before it is ready.
    """

    def __init__(self, config: RLConfig, device: str, place: Path, longest: int, *, rank: int, size: int) -> None:
        self._command = [sys.executable, "-m", "tilewright.rl.sampler_process", str(place)]
        self._saying = threading.Lock()
        self.process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        sampler_config = replace(config, device=device, sampler="", staleness=0, handover="memory").to_json()
        first = {"config": sampler_config, "longest": longest, "threads": torch.get_num_threads(), "handover": config.handover}
        try:
            self._say({**first, "rank": rank, "size": size})
        except BaseException:
            self.close()
            raise

    def wait(self) -> None:
        """Wait until the process is ready. Raises ConnectionError if it ends before."""
        self._hear("was ready")

    def __call__(
        self, prompts: Sequence[Sequence[int]], *, answers: int, max_tokens: int, seed: int, places: Sequence[int] | None = None
    ) -> list[list[Answer]]:
        """As `Sampler`. Each answer states the version of the weights it was sampled with.

        Raises:
            ConnectionError: the process has ended.
        """
        call = {"answers": answers, "max_tokens": max_tokens, "seed": seed}
        self._say({"prompts": [list(prompt) for prompt in prompts], **call, "places": None if places is None else list(places)})
        return [[Answer(**answer) for answer in group] for group in self._hear("answered")]

    def take(self, version: int) -> None:
        """Request that the process takes part in a broadcast of these weights, after its current work. Raises ConnectionError
        if the process has ended."""
        self._say({"take": version})

    def check_alive(self) -> None:
        """Raise ConnectionError if the process has ended."""
        if self.process.poll() is not None:
            self._raise_ended("received weights")

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait(_ENDS_S)
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()

    def _say(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        try:
            with self._saying:  # one thread may announce weights while another one waits for answers
                print(json.dumps(message), file=self.process.stdin, flush=True)
        except (BrokenPipeError, ValueError):  # the process has ended, or the pipe was closed
            self._raise_ended("received a request")

    def _hear(self, before: str) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline(_LONGEST_LINE)
        if not line.endswith("\n"):
            self._raise_ended(before)
        return json.loads(line)

    def _raise_ended(self, before: str) -> None:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_ENDS_S)
        raise ConnectionError(
            f"the sampler's process {self.process.pid} ended with code {self.process.returncode} before it {before}; its "
            f"error, if it had one, is above: {' '.join(self._command[1:])}"
        )
