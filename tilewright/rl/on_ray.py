"""Samplers on a Ray cluster: an actor each, with a GPU where the cluster has any. Weights go through Ray's object store.

The cluster is the one that RAY_ADDRESS names or that runs on this machine; else one is started here and ends with the run.
Every machine needs the same packages, and the model's folder under the same name.
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
from ray.exceptions import RayError
from torch import Tensor

from tilewright.models import Model
from tilewright.rl.config import RLConfig
from tilewright.rl.policies import policy_of
from tilewright.rl.rollout import Answer
from tilewright.rl.sampler_process import sampler_of
from tilewright.rl.samplers import dealt

__all__ = ["Actor", "RaySamplers"]

_LEAST_STORE = 128 << 20
Weights = list[NDArray[np.uint8]]
"""The bytes of a model's parameters, by name."""


def parameters_of(model: Model) -> list[Tensor]:
    """In the order of their names."""
    return [parameter.detach() for _, parameter in sorted(model.named_parameters())]


class Actor:
    """The sampler's side: a model of the config's, which waits for weights."""

    def __init__(self, config: dict[str, Any], longest: int, threads: int) -> None:
        torch.set_num_threads(threads)
        chosen = RLConfig(**config)
        text, self._model = policy_of(chosen)
        self._model.requires_grad_(False)
        self._sampler = sampler_of(chosen, self._model, longest, text.end_ids)
        self._sampler.version = -1

    def load(self, version: int, weights: Weights) -> None:
        """Take these weights."""
        for parameter, told in zip(parameters_of(self._model), weights, strict=True):
            whole = torch.from_numpy(told.copy()).view(parameter.dtype).view(parameter.shape)  # the store's is read-only
            parameter.copy_(whole)
        self._sampler.version = version

    def sample(self, call: dict[str, Any]) -> list[list[dict[str, Any]]]:
        """As `Sampler` does, in plain values."""
        return [[asdict(answer) for answer in group] for group in self._sampler(**call)]


class _Member:
    """One actor, called as `Sampler` is."""

    def __init__(self, place: int, actor: Any) -> None:
        self.place, self.actor = place, actor

    def __call__(self, prompts: Sequence[Sequence[int]], **call: Any) -> list[list[Answer]]:
        made = self.had(self.actor.sample.remote({"prompts": [list(prompt) for prompt in prompts], **call}), "answered")
        return [[Answer(**answer) for answer in group] for group in made]

    def had(self, what: Any, before: str) -> Any:
        """What it returns. Raises ConnectionError where it has ended, or could not."""
        try:
            return ray.get(what)
        except RayError as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            raise ConnectionError(f"sampler {self.place} on Ray ended before it {before}: {lines[-1][:400]}") from None


class RaySamplers:
    """As many actors as `config.sampler` says, `ray:N`.

    Raises:
        ConnectionError: one of them ends before it is ready.
    """

    def __init__(self, config: RLConfig, model: Model, longest: int) -> None:
        count = int(config.sampler.removeprefix("ray:"))
        self._parameters = parameters_of(model)
        self.nbytes = sum(parameter.nbytes for parameter in self._parameters)
        quiet = {"logging_level": logging.WARNING, "configure_logging": False}
        try:
            ray.init(address="auto", **quiet)
        except ConnectionError:
            store = max(_LEAST_STORE, 3 * self.nbytes)
            ray.init(address="local", include_dashboard=False, object_store_memory=store, **quiet)
        try:
            cluster = ray.cluster_resources()
            on_card = cluster.get("GPU", 0) >= count
            cores = max(1, int(cluster.get("CPU", 1)) // count)
            device = "cuda" if on_card else "cpu"
            told = replace(config, device=device, sampler="", staleness=0).to_json()
            kind = ray.remote(num_cpus=0 if on_card else min(1, cores), num_gpus=1 if on_card else 0)(Actor)
            made = [kind.remote(told, longest, torch.get_num_threads()) for _ in range(count)]
            self.samplers = [_Member(place, actor) for place, actor in enumerate(made)]
            for sampler, loading in zip(self.samplers, self._given(0)):
                sampler.had(loading, "was ready")
        except BaseException:
            self.close()
            raise

    def push(self, version: int) -> dict[str, float]:
        """Put the weights into the store; each actor takes them behind what it is doing."""
        began = time.perf_counter()
        self._given(version)  # what goes wrong there shows when it samples
        took = time.perf_counter() - began
        return {"push_s": took, "push_gb_per_s": self.nbytes / took / 1e9}

    def __call__(
        self, prompts: Sequence[Sequence[int]], *, answers: int, max_tokens: int, seed: int, places: Sequence[int] | None = None
    ) -> list[list[Answer]]:
        """As `Sampler` does, by all of them at once. Raises ConnectionError where one has ended."""
        return dealt(self.samplers, prompts, answers=answers, max_tokens=max_tokens, seed=seed, places=places)

    def close(self) -> None:
        """End the actors, and leave the cluster."""
        for sampler in getattr(self, "samplers", []):
            with suppress(RayError):
                ray.kill(sampler.actor)
        ray.shutdown()

    def _given(self, version: int) -> list[Any]:
        weights = ray.put([parameter.cpu().contiguous().view(torch.uint8).numpy() for parameter in self._parameters])
        return [sampler.actor.load.remote(version, weights) for sampler in self.samplers]
