"""Samplers on a Ray cluster. Each is an actor on any machine of the cluster, with one GPU if the cluster has enough GPUs.

The cluster is the one named by RAY_ADDRESS, or one that runs on this machine. Otherwise one is started here, and ends with the
run. Weights go through Ray's object store, once for each machine. Every machine needs the same packages. Files that the config
names must exist under the same names on every machine.

If an actor or its machine ends, the answers to its prompts are missing, and are counted as lost. Another actor is started in
its place, with the newest weights. The run ends if actors in the same place end several times in succession without having
answered anything, or if an actor raises an error.
"""

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError

from tilewright.models import Model
from tilewright.rl.config import RLConfig
from tilewright.rl.policies import policy_of
from tilewright.rl.quantised import requantise
from tilewright.rl.rollout import Answer
from tilewright.rl.sampler_process import sampler_of
from tilewright.rl.samplers import dealt
from tilewright.rl.shared_weights import parameters_of

__all__ = ["Actor", "RaySamplers"]

_LEAST_STORE = 128 << 20
_MOST_ENDS = 3
"""The run ends at this number of successive failures of the actors in one place."""
Weights = list[NDArray[np.uint8]]
"""The bytes of each parameter of a model, in the order of the parameters' names."""


class Actor:
    """The sampler's side: a model as described by the config. Its weights are set by `load`."""

    def __init__(self, config: dict[str, Any], longest: int, threads: int) -> None:
        torch.set_num_threads(threads)
        chosen = RLConfig(**config)
        text, self._model = policy_of(chosen)
        self._model.requires_grad_(False)
        self._sampler = sampler_of(chosen, self._model, longest, text.end_ids)
        self._sampler.version = -1

    def load(self, version: int, weights: Weights) -> None:
        """Load these weights."""
        for parameter, received in zip(parameters_of(self._model), weights, strict=True):
            whole = torch.from_numpy(received.copy()).view(parameter.dtype).view(parameter.shape)  # Ray's store is read-only
            parameter.copy_(whole)
        requantise(self._model)
        self._sampler.version = version

    def sample(self, call: dict[str, Any]) -> list[list[dict[str, Any]]]:
        """As `Sampler`, with arguments and results as JSON values."""
        return [[asdict(answer) for answer in group] for group in self._sampler(**call)]


class RaySamplers:
    """The samplers of `config.sampler` = "ray:N", which are N actors.

    Raises:
        ConnectionError: an actor cannot be started.
    """

    def __init__(self, config: RLConfig, model: Model, longest: int) -> None:
        count = int(config.sampler.removeprefix("ray:"))
        self._parameters = parameters_of(model)
        self.nbytes = sum(parameter.nbytes for parameter in self._parameters)
        self.lost_actors = 0
        """Number of actors that have ended so far."""
        self.actors: list[Any] = []
        _join(self.nbytes)
        try:
            cluster = ray.cluster_resources()
            on_card, cores = cluster.get("GPU", 0) >= count, max(1, int(cluster.get("CPU", 1)) // count)
            sampler_config = replace(config, device="cuda" if on_card else "cpu", sampler="", staleness=0).to_json()
            kind = ray.remote(num_cpus=0 if on_card else min(1, cores), num_gpus=1 if on_card else 0)(Actor)
            self._make = lambda: kind.remote(sampler_config, longest, torch.get_num_threads())
            self.actors = [self._make() for _ in range(count)]
            self._ends = [0] * count
            self._given: tuple[int, Any] = (0, None)
            self.push(0)
            for place, actor in enumerate(self.actors):
                self._had(place, actor.sample.remote({"prompts": [], "answers": 1, "max_tokens": 1, "seed": 0}), "was ready")
        except BaseException:
            self.close()
            raise

    def push(self, version: int) -> dict[str, float]:
        """Put the weights into the store. Each actor loads them after its current work. Errors are reported at the next
        sampling."""
        began = time.perf_counter()
        self._given = version, ray.put([p.cpu().contiguous().view(-1).view(torch.uint8).numpy() for p in self._parameters])
        for actor in self.actors:
            actor.load.remote(*self._given)
        took = time.perf_counter() - began
        return {"push_s": took, "push_gb_per_s": self.nbytes / took / 1e9, "lost_samplers": self.lost_actors}

    def __call__(
        self, prompts: Sequence[Sequence[int]], *, answers: int, max_tokens: int, seed: int, places: Sequence[int] | None = None
    ) -> list[list[Answer]]:
        """As `Sampler`, with all actors at once. The prompts of an actor that ends during the call have no answers. If all
        actors end, the call is repeated. Raises ConnectionError if the actors in one place end again and again, or if an actor
        raises an error."""
        members = [self._member(place) for place in range(len(self.actors))]
        while True:
            found = dealt(members, prompts, answers=answers, max_tokens=max_tokens, seed=seed, places=places)
            if not prompts or any(found):
                return found

    def close(self) -> None:
        """End the actors and leave the cluster."""
        for actor in self.actors:
            with suppress(RayError):
                ray.kill(actor)
        ray.shutdown()

    def _member(self, place: int) -> Any:
        def sample(prompts: Sequence[Sequence[int]], **call: Any) -> list[list[Answer]]:
            asked = {"prompts": [list(prompt) for prompt in prompts], **call}
            made = self._had(place, self.actors[place].sample.remote(asked), "answered")
            if made is None:
                return [[] for _ in prompts]
            return [[Answer(**answer) for answer in group] for group in made]

        return sample

    def _had(self, place: int, what: Any, before: str) -> Any:
        """The result of an actor; None if the actor has ended and another one was started in its place. Raises
        ConnectionError."""
        try:
            found = ray.get(what)
        except (RayActorError, OutOfMemoryError) as error:
            self.lost_actors += 1
            self._ends[place] += 1
            if self._ends[place] >= _MOST_ENDS or before == "was ready":
                raise ConnectionError(f"sampler {place} on Ray ended before it {before}: {_why(error)}") from None
            self.actors[place] = self._make()
            self.actors[place].load.remote(*self._given)
            return None
        except RayError as error:
            raise ConnectionError(f"sampler {place} on Ray failed before it {before}: {_why(error)}") from None
        self._ends[place] = 0
        return found


def _join(nbytes: int) -> None:
    """Connect to the existing cluster, or start a new one with room for three versions of the weights."""
    quiet: dict[str, Any] = {"logging_level": logging.WARNING, "configure_logging": False}
    try:
        ray.init(address="auto", **quiet)
    except ConnectionError:
        store = max(_LEAST_STORE, 3 * nbytes)
        ray.init(address="local", include_dashboard=False, object_store_memory=store, **quiet)


def _why(error: RayError) -> str:
    """The last line of an error's text that is not empty."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:400] if lines else type(error).__name__
