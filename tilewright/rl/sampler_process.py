"""The sampler process of a trainer: `python -m tilewright.rl.sampler_process WEIGHTS`, started by `remote.py`.

Requests are lines of JSON. The first has the config, the longest conversation and this sampler's rank; it is answered when the
model is ready. The following ones are calls with the arguments of `Sampler`, which are answered, or announcements of the
version of weights that is about to be broadcast. Weights in shared memory are copied before a call. Answers have the version of
their weights.
"""

import contextlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tilewright.models import Model
from tilewright.rl.broadcast_weights import BroadcastWeights
from tilewright.rl.config import RLConfig
from tilewright.rl.policies import policy_of
from tilewright.rl.quantised import requantise
from tilewright.rl.rollout import Sampler
from tilewright.rl.shared_weights import SharedWeights

__all__ = ["main", "sampler_of"]

_SEQS = {"cuda": (1, 1024), "cpu": (256, 256)}
"""Lower and upper bound of the samples that a sampler can decode at once; in between, it is the number of a step.

A step of the small model takes a GPU equally long for 256 and for 1,024. On a CPU, products with few rows have other bits than
a trainer's, and quantising activations magnifies this.
"""


def sampler_of(config: RLConfig, model: Model, longest: int, end_ids: tuple[int, ...]) -> Sampler:
    """A sampler for this model as in the config, for conversations of up to `longest` tokens."""
    least, most = _SEQS[next(model.parameters()).device.type]
    seqs = max(least, min(most, config.prompts * config.answers))
    return Sampler(
        model, max_len=longest, seqs=seqs, end_ids=end_ids, invariant=config.invariant, drawing=config.drawing,
        cache_bytes=config.cache_bytes or None, shares=config.free_cache,
    )  # fmt: skip


class _Taker:
    """The model, and where its weights come from."""

    def __init__(self, model: Model, sampler: Sampler, weights: SharedWeights | BroadcastWeights) -> None:
        self._model, self._sampler, self._weights = model, sampler, weights
        sampler.version = -1

    def take(self, version: int) -> None:
        """Receive weights that are being broadcast."""
        assert isinstance(self._weights, BroadcastWeights)
        self._weights.pull()
        requantise(self._model)
        self._sampler.version = version

    def sample(self, call: dict[str, Any]) -> list[list[dict[str, Any]]]:
        """Sample with the newest weights."""
        if isinstance(self._weights, SharedWeights) and self._weights.version != self._sampler.version:
            self._sampler.version = self._weights.pull()
            requantise(self._model)
        return [[asdict(answer) for answer in group] for group in self._sampler(**call)]


def main() -> None:
    """Serve one trainer until its end of the pipe closes."""
    replies = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # what libraries print must not be taken for an answer
        first, place = json.loads(sys.stdin.readline()), Path(sys.argv[1])
        config = RLConfig(**first["config"])
        torch.set_num_threads(first["threads"])
        text, model = policy_of(config)
        model.requires_grad_(False)
        if first["handover"] == "broadcast":
            weights = BroadcastWeights(model, place, rank=first["rank"], size=first["size"])
        else:
            weights = SharedWeights(model, place, on_card=first["handover"] == "card")
        taker = _Taker(model, sampler_of(config, model, first["longest"], text.end_ids), weights)
        print(json.dumps({"ready": True}), file=replies, flush=True)
        if isinstance(weights, BroadcastWeights):
            weights.join()
        for line in sys.stdin:
            request = json.loads(line)
            if "take" in request:
                taker.take(request["take"])
            else:
                print(json.dumps(taker.sample(request)), file=replies, flush=True)


if __name__ == "__main__":
    main()
