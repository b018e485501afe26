"""The sampler process of a trainer: `python -m tilewright.rl.sampler_process WEIGHTS`, started by `remote.py`.

Requests are lines of JSON. The first request contains the config, the greatest length of a conversation and the rank of this
sampler; it is answered when the model is ready. Each later request is one of two kinds. A call contains the arguments of
`Sampler`, and is answered with the samples. An announcement contains the version of the weights that are about to be broadcast,
and is not answered. Weights in shared memory are copied before a call. Answers contain the version of the weights they were
sampled with.
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
"""Lower and upper bound of the number of samples that are decoded at the same time. Between the bounds, it is the number of
samples per step.

On a GPU, a decoding step of the small model takes the same time for 256 samples as for 1,024. On a CPU, products with few rows
give other bits than the trainer's products, and quantised activations magnify the difference.
"""


def sampler_of(config: RLConfig, model: Model, longest: int, end_ids: tuple[int, ...]) -> Sampler:
    """A sampler for this model, with the settings of the config, for conversations of up to `longest` tokens."""
    least, most = _SEQS[next(model.parameters()).device.type]
    seqs = max(least, min(most, config.prompts * config.answers))
    return Sampler(
        model, max_len=longest, seqs=seqs, end_ids=end_ids, invariant=config.invariant, drawing=config.drawing,
        cache_bytes=config.cache_bytes or None, shares=config.free_cache,
    )  # fmt: skip


class _Taker:
    """The model, its sampler, and the source of its weights."""

    def __init__(self, model: Model, sampler: Sampler, weights: SharedWeights | BroadcastWeights) -> None:
        self._model, self._sampler, self._weights = model, sampler, weights
        sampler.version = -1

    def take(self, version: int) -> None:
        """Receive the weights of this version, which are being broadcast."""
        assert isinstance(self._weights, BroadcastWeights)
        self._weights.pull()
        requantise(self._model)
        self._sampler.version = version

    def sample(self, call: dict[str, Any]) -> list[list[dict[str, Any]]]:
        """Sample with the newest weights. `call`: the arguments of `Sampler`."""
        if isinstance(self._weights, SharedWeights) and self._weights.version != self._sampler.version:
            self._sampler.version = self._weights.pull()
            requantise(self._model)
        return [[asdict(answer) for answer in group] for group in self._sampler(**call)]


def main() -> None:
    """Serve one trainer until it closes its end of the pipe."""
    replies = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # output of libraries must not be mistaken for an answer
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
