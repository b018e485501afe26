"""A sampler in a process of its own: the trainer's side. Weights go through shared memory, calls and answers through pipes."""

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from tilewright.rl.config import RLConfig
from tilewright.rl.rollout import Answer
from tilewright.rl.shared_weights import SharedWeights

__all__ = ["RemoteSampler"]

_LONGEST_LINE = 1 << 30
_ENDS_S = 10.0


class RemoteSampler:
    """Samples as `Sampler` does, on `device`, by the weights that were written into `weights` last.

    longest: tokens of a conversation.

    Raises:
        ConnectionError: the process ends before it is ready.
    """

    def __init__(self, config: RLConfig, device: str, weights: SharedWeights, longest: int) -> None:
        self._command = [sys.executable, "-m", "tilewright.rl.sampler_process", str(weights.path)]
        self.process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        told = replace(config, device=device, sampler="", staleness=0).to_json()
        try:
            self._say({"config": told, "longest": longest, "threads": torch.get_num_threads()})
        except BaseException:
            self.close()
            raise

    def wait(self) -> None:
        """Until it is ready. Raises as the class does."""
        self._hear("was ready")

    def __call__(
        self, prompts: Sequence[Sequence[int]], *, answers: int, max_tokens: int, seed: int, places: Sequence[int] | None = None
    ) -> list[list[Answer]]:
        """As `Sampler` does; each answer says the version of its weights.

        Raises:
            ConnectionError: the process has ended.
        """
        call = {"answers": answers, "max_tokens": max_tokens, "seed": seed}
        self._say({"prompts": [list(prompt) for prompt in prompts], **call, "places": None if places is None else list(places)})
        return [[Answer(**answer) for answer in group] for group in self._hear("answered")]

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
            print(json.dumps(message), file=self.process.stdin, flush=True)
        except (BrokenPipeError, ValueError):  # it has ended, or was closed
            self._raise_ended("was asked")

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
