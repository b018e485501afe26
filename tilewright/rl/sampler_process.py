"""The process that samples beside a trainer: `python -m tilewright.rl.sampler_process WEIGHTS`, started by `remote.py`.

Lines of JSON, one a request. The first has the config, the longest conversation and this sampler's rank; it is answered once
the model is there. Then come calls, which have what `Sampler` is called with and are answered, and versions of weights that are
about to be broadcast. Weights in shared memory are copied out of it before a call. Answers say the version of the weights.
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
from tilewright.rl.quantised import recode
from tilewright.rl.rollout import Sampler
from tilewright.rl.shared_weights import SharedWeights

__all__ = ["main", "sampler_of"]

_SEQS = {"cuda": (1, 1024), "cpu": (256, 256)}
"""Samples that a sampler has room to decode at once, at least and at most; between these, as many as a step has.

A step of the small model costs a GPU the same for 256 and for 1,024. On a CPU products of few rows have other bits than a
trainer's, which codes of activations magnify.
"""


def sampler_of(config: RLConfig, model: Model, longest: int, end_ids: tuple[int, ...]) -> Sampler:
    """A sampler of this model as the config has it, for conversations of up to `longest` tokens."""
    least, most = _SEQS[next(model.parameters()).device.type]
    seqs = max(least, min(most, config.prompts * config.answers))
    return Sampler(
        model, max_len=longest, seqs=seqs, end_ids=end_ids, invariant=config.invariant, drawing=config.drawing,
        cache_bytes=config.cache_bytes or None, shares=config.free_cache,
    )  # fmt: skip


class _Taker:
    """The model and where its weights come from."""

    def __init__(self, model: Model, sampler: Sampler, weights: SharedWeights | BroadcastWeights) -> None:
        self._model, self._sampler, self._weights = model, sampler, weights
        sampler.version = -1

    def take(self, version: int) -> None:
        """Weights that are being broadcast."""
        assert isinstance(self._weights, BroadcastWeights)
        self._weights.pull()
        recode(self._model)
        self._sampler.version = version

    def sample(self, call: dict[str, Any]) -> list[list[dict[str, Any]]]:
        """By the newest weights that there are."""
        if isinstance(self._weights, SharedWeights) and self._weights.version != self._sampler.version:
            self._sampler.version = self._weights.pull()
            recode(self._model)
        return [[asdict(answer) for answer in group] for group in self._sampler(**call)]


def main() -> None:
    """Serve one trainer until its end of the pipe closes."""
    replies = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # what a library prints is no reply
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
