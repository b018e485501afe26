"""The process that samples beside a trainer: `python -m tilewright.rl.sampler_process WEIGHTS`, started by `remote.py`.

Lines of JSON, one a call: first the config and the longest conversation, which is answered once the model is there; then what
`Sampler` is called with. Before each call the newest weights are copied out of shared memory, and answers say their version.
"""

import contextlib
import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from tilewright.models import Model
from tilewright.rl.config import RLConfig
from tilewright.rl.policies import policy_of
from tilewright.rl.quantised import recode
from tilewright.rl.rollout import Sampler
from tilewright.rl.shared_weights import SharedWeights

__all__ = ["main", "sampler_of"]

_SEQS = 256


def sampler_of(config: RLConfig, model: Model, longest: int, end_ids: tuple[int, ...]) -> Sampler:
    """A sampler of this model as the config has it, for conversations of up to `longest` tokens."""
    return Sampler(
        model, max_len=longest, seqs=_SEQS, end_ids=end_ids, invariant=config.invariant, drawing=config.drawing,
        cache_bytes=config.cache_bytes or None, shares=config.free_cache,
    )  # fmt: skip


def main() -> None:
    """Serve one trainer until its end of the pipe closes."""
    replies = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # what a library prints is no reply
        first = json.loads(sys.stdin.readline())
        config = RLConfig(**first["config"])
        torch.set_num_threads(first["threads"])
        text, model = policy_of(config)
        model.requires_grad_(False)
        weights = SharedWeights(model, Path(sys.argv[1]))
        sampler = sampler_of(config, model, first["longest"], text.end_ids)
        print(json.dumps({"ready": True}), file=replies, flush=True)
        sampler.version = -1
        for line in sys.stdin:
            if weights.version != sampler.version:
                sampler.version = weights.pull()
                recode(model)
            found = sampler(**json.loads(line))
            print(json.dumps([[asdict(answer) for answer in group] for group in found]), file=replies, flush=True)


if __name__ == "__main__":
    main()
