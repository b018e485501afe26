"""The samplers of a run that samples in separate processes, on one or several devices of this machine.

Each sampler receives a share of the prompts of a call. A draw depends on the index of its prompt in the whole call, so the
results do not depend on the number of samplers, except for rounding. `config.handover` states how samplers receive weights.
"""

import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import torch

from tilewright.models import Model
from tilewright.rl.broadcast_weights import BroadcastWeights
from tilewright.rl.config import RLConfig
from tilewright.rl.remote import RemoteSampler
from tilewright.rl.rollout import Answer, Samples
from tilewright.rl.shared_weights import SharedWeights

__all__ = ["RemoteSamplers", "check_devices", "dealt"]


class RemoteSamplers:
    """One sampler process on each device named in `config.sampler`, with the weights of `model`.

    longest: greatest number of tokens in a conversation.

    Raises:
        ConnectionError: a process ends before it is ready.
        ValueError: `config.handover` is not possible between these devices.
    """

    def __init__(self, config: RLConfig, model: Model, longest: int) -> None:
        devices, own = config.sampler_devices, next(model.parameters()).device
        check_devices(config.handover, own, devices)
        self.samplers: list[RemoteSampler] = []
        self._closing = ExitStack()
        try:
            self.weights: SharedWeights | BroadcastWeights
            if config.handover == "broadcast":
                folder = Path(self._closing.enter_context(tempfile.TemporaryDirectory(prefix="tilewright-")))
                place, self.weights = folder, BroadcastWeights(model, folder, rank=0, size=1 + len(devices))
            else:
                self.weights = SharedWeights(model, on_card=config.handover == "card")
                place = self.weights.path
            self._closing.callback(self.weights.close)
            for rank, device in enumerate(devices, 1):
                self.samplers.append(RemoteSampler(config, device, place, longest, rank=rank, size=1 + len(devices)))
                self._closing.callback(self.samplers[-1].close)  # samplers are closed before the weights
            for sampler in self.samplers:
                sampler.wait()
            if isinstance(self.weights, BroadcastWeights):
                self.weights.join()
            self.push(0)
        except BaseException:
            self.close()
            raise

    def push(self, version: int) -> dict[str, float]:
        """Transfer the model's weights to the samplers. Returns timings. Raises ConnectionError if a sampler has ended."""
        if isinstance(self.weights, SharedWeights):
            return self.weights.push(version)
        for sampler in self.samplers:
            sampler.take(version)
        return self.weights.push(version, self._check_alive)

    def __call__(
        self, prompts: Sequence[Sequence[int]], *, answers: int, max_tokens: int, seed: int, places: Sequence[int] | None = None
    ) -> list[list[Answer]]:
        """As `Sampler`, with all processes at once. Raises ConnectionError if a process has ended."""
        return dealt(self.samplers, prompts, answers=answers, max_tokens=max_tokens, seed=seed, places=places)

    def close(self) -> None:
        """End the processes and free the shared memory."""
        self._closing.close()

    def _check_alive(self) -> None:
        for sampler in self.samplers:
            sampler.check_alive()


def check_devices(handover: str, own: torch.device, others: Sequence[str]) -> None:
    """Raise ValueError if weights cannot be transferred by `handover` from the device `own` to samplers on `others`."""
    names = [str(own), *(f"{name}:0" if name == "cuda" else name for name in others)]
    if handover == "card" and (own.type != "cuda" or len(set(names)) > 1):
        raise ValueError(
            'handover is "card", which needs the trainer and all samplers on the same GPU, but they are on '
            f'{", ".join(names)}; use "memory", or "broadcast" between several GPUs'
        )
    if handover == "broadcast" and (cards := [name for name in names if name != "cpu"]):
        if len(set(cards)) < len(names):
            raise ValueError(
                'handover is "broadcast", which needs a separate GPU for the trainer and each sampler, or only CPUs, but they '
                f'are on {", ".join(names)}; use "memory", or "card" on a single GPU'
            )


def dealt(
    samplers: Sequence[Samples], prompts: Sequence[Sequence[int]], *, answers: int, max_tokens: int, seed: int,
    places: Sequence[int] | None,
) -> list[list[Answer]]:  # fmt: skip
    """The answers to all prompts, in order. Each sampler works on an equal share; all of them work at the same time."""
    whole = [index * answers for index in range(len(prompts))] if places is None else list(places)
    count = len(samplers)
    cuts = [len(prompts) * place // count for place in range(count + 1)]

    def part(place: int) -> list[list[Answer]]:
        mine = slice(cuts[place], cuts[place + 1])
        if not prompts[mine]:
            return []
        return samplers[place](prompts[mine], answers=answers, max_tokens=max_tokens, seed=seed, places=whole[mine])

    if count == 1:
        return part(0)
    with ThreadPoolExecutor(count) as pool:
        return [group for some in pool.map(part, range(count)) for group in some]
