"""All models of a server by name: loads, replaces and unloads them, and routes requests to them.

To replace a model, the new version is loaded while the old one still serves. Requests that are already there finish with the
old one; requests that arrive when the new one is warm go to the new one. If the new one cannot be loaded, the old one stays,
and the error says why.
"""

import asyncio
import functools
import hashlib
import logging
import os
import random
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from tilewright.host.compare import differs
from tilewright.host.config import ModelConfig, check_name
from tilewright.host.errors import HostError, NotFound, Refused, Unavailable
from tilewright.host.forking import Nursery
from tilewright.host.instance import Instance
from tilewright.host.loading import RETRY_S, Loading
from tilewright.host.model import Answer, Model, Source
from tilewright.host.pipeline import Pipeline, signature_of
from tilewright.host.regions import Part
from tilewright.host.repository import Found, Repository
from tilewright.host.runs import Runs
from tilewright.host.sequences import Sequences, outer
from tilewright.host.tensors import Signature, Wire
from tilewright.host.version import Ask, Version

__all__ = ["Answer", "Host", "Model", "Source"]

DRAIN_S = 60.0
"""Seconds for which requests of a replaced version may still run."""
MAX_SHADOWS = 64
"""Most shadow requests at once; further ones are left out."""

logger = logging.getLogger(__name__)


Start = Callable[[ModelConfig, Path | None, int, Callable[[str], None]], Awaitable[tuple[Runs, Signature]]]
"""(config, the version's folder, threads, a function called with each stage) -> (a process that has loaded the model and is
warm, the model's signature)."""


class Host:
    """All models of a server. Must be made and used on one event loop.

    Args:
        repository: a folder of models; None: nothing can be loaded later.
        sources: models named on the command line.
        start: starts a process for a model; None: forks a process that has imported torch.
    """

    def __init__(
        self,
        repository: Repository | None = None,
        sources: Mapping[str, Source] | None = None,
        start: Start | None = None,
    ):
        self.repository, self.sources = repository, dict(sources or {})
        self._nursery = Nursery()
        self._start: Start = start or functools.partial(Instance.start, self._nursery)
        self.models: dict[str, Model] = {}
        self.failed: dict[str, str] = {}
        """Model -> the reason why it is not loaded."""
        self.started = False
        """Whether loading at the start is over: each model is loaded, or cannot be."""
        self._loads: dict[str, Loading] = {}
        """Model -> the progress of its loading."""
        self._locks: dict[str, asyncio.Lock] = {}
        self._tasks = set[asyncio.Task[Any]]()
        self._shadows = 0
        for name in self.sources:
            check_name(name)
            if repository is not None and name in repository:
                raise ValueError(f"two models have the name {name!r}: one on the command line, one in the repository")

    # ---- coming and going

    async def start(self) -> None:
        """Load everything. What fails of the repository is logged and stands in the index; the rest is served.

        Raises:
            Refused: a model that the command line names cannot be loaded. Those behind it are not tried.
            ValueError: the repository has too many models.
        """
        names = [*self.sources, *(self.repository.names() if self.repository is not None else ())]
        # Pipelines come last, because they consist of other models.
        for name in sorted(names, key=self._is_pipeline):
            try:
                await self.load(name)
            except HostError as error:
                if name in self.sources:
                    raise
                logger.error("%s", error)
        self.started = True

    @property
    def loading(self) -> Loading | None:
        """The model that is being loaded at the start; None when that is over."""
        return None if self.started else next(iter(self._loads.values()), Loading("models"))

    def awaited(self, name: str) -> str | None:
        """A sentence about a model that is being loaded, or that will be during the start; None for other models."""
        if name in self._loads:
            return f"model {self._loads[name].sentence}"
        known = name in self.sources or (self.repository is not None and name in self.repository)
        if self.started or name in self.failed or not known:
            return None
        return f"model {name} is loaded later: {self.loading.sentence}" if self.loading else None

    def _is_pipeline(self, name: str) -> bool:
        try:
            return bool(self._described(name).config.steps)
        except (ValueError, OSError):
            return False

    def _described(self, name: str) -> Found:
        source = self.sources.get(name)
        if source is not None:
            return Found(source.config, {1: source.folder}, {1: "command line"})
        if self.repository is None:
            raise ValueError(f"there is no model {name[:80]!r}, and no repository to load one from")
        return self.repository.find(name)

    async def load(self, name: str) -> None:
        """Load a model, or the versions that have changed.

        Raises NotFound, or Refused if it cannot be loaded; the versions that were loaded then stay.
        """
        if name not in self.sources and (self.repository is None or name not in self.repository):
            raise NotFound(f"there is no model {name[:80]!r} to load")
        async with self._locks.setdefault(name, asyncio.Lock()):
            try:
                self._loads[name] = Loading(name)
                await self._load(name)
            except (ValueError, OSError) as error:
                self.failed[name] = str(error)
                stays = "; the version that was loaded before stays" if name in self.models else ""
                raise Refused(f"model {name} cannot be loaded: {error}{stays}") from None
            finally:
                del self._loads[name]
            self.failed.pop(name, None)

    async def _load(self, name: str) -> None:
        found = self._described(name)
        config, old = found.config, self.models.get(name)
        if config.steps:
            signatures = {model: self.models[model].signature for model in self.models}
            signature = signature_of(config.steps, signatures)
            pipeline = Pipeline(name, config.steps, signature, self._step, config.max_batch)
            self.models[name] = Model(name, config, signature, pipeline=pipeline)
            return
        wanted = [member.version for member in config.versions] or [max(found.versions)]
        missing = [number for number in wanted if number not in found.versions]
        if missing:
            raise ValueError(f"versions names {missing[0]}, wanted some of {', '.join(map(str, sorted(found.versions)))}")
        had, marks = (old.versions, old.marks) if old else ({}, {})
        kept = {n: version for n, version in had.items() if n in wanted and marks[n] == found.marks[n]}
        made = dict[int, Version]()
        try:
            for number in wanted:
                if number not in kept:
                    made[number] = await self._version(name, number, config, found.versions[number])
            versions = {**kept, **made}
            signature = self._common(versions)
        except BaseException:
            for version in made.values():
                await version.close()
            raise
        sequences = {n: Sequences(v) for n, v in versions.items() if config.state}
        new = {number: found.marks[number] for number in versions}
        self.models[name] = Model(name, config, signature, versions, new, sequences)
        for number, version in had.items():
            if kept.get(number) is not version:
                self._later(version.close(drain_s=DRAIN_S))

    @staticmethod
    def _common(versions: Mapping[int, Version]) -> Signature:
        """The signature of a model, which must be the same for all of its versions."""
        first = next(iter(versions.values()))
        for version in versions.values():
            if version.signature != first.signature:
                raise ValueError(f"versions {first.number} and {version.number} have different inputs or outputs")
        return outer(first.signature, first.config.state)

    async def _version(self, name: str, number: int, config: ModelConfig, folder: Path | None) -> Version:
        threads = config.threads or max(1, (os.cpu_count() or 1) // config.instances - 1)
        loading = self._loads[name] = Loading(f"{name} version {number}")
        first, signature = await self._start(config, folder, threads, loading.note)
        instances = [first]

        async def another(note: Callable[[str], None] = lambda stage: None) -> Runs:
            return (await self._start(config, folder, threads, note))[0]

        try:
            outer(signature, config.state)
            while len(instances) < config.instances:
                loading.what = f"{name} version {number}, process {len(instances) + 1} of {config.instances}"
                instances.append(await another(loading.note))
        except BaseException:
            for instance in instances:
                instance.close()
            raise
        return Version(name, number, config, signature, instances, another)

    async def unload(self, name: str) -> None:
        """Unload a model. Raises NotFound if it is not loaded."""
        async with self._locks.setdefault(name, asyncio.Lock()) if name in self.models else asyncio.Lock():
            model = self.models.pop(name, None)
        if model is None:
            raise NotFound(f"there is no model {name[:80]!r} that is loaded")
        self.failed[name] = "unloaded"
        for version in model.versions.values():
            self._later(version.close(drain_s=DRAIN_S))

    def _later(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @property
    def running(self) -> int:
        """The number of requests that wait or are computed."""
        return sum(v.waiting + v.running for model in self.models.values() for v in model.versions.values())

    def abort(self, reason: str) -> None:
        """Answer all open requests with an error; running batches are lost."""
        for model in self.models.values():
            for version in model.versions.values():
                version.abort(reason)

    async def close(self) -> None:
        """End all processes."""
        for model in self.models.values():
            for version in model.versions.values():
                await version.close()
        for task in self._tasks:
            task.cancel()
        self._nursery.close()

    # ---- requests

    def model(self, name: str) -> Model:
        """A loaded model. Raises NotFound, or Unavailable if it is being loaded or could not be loaded."""
        model = self.models.get(name)
        if model is None:
            if (awaited := self.awaited(name)) is not None:
                raise Unavailable(awaited, RETRY_S)
            why = self.failed.get(name)
            if why is None:
                known = ", ".join(sorted(self.models)[:20]) or "none"
                raise NotFound(f"there is no model {name[:80]!r}; loaded are: {known}")
            raise Unavailable(f"model {name} is not loaded: {why}", 10.0)
        return model

    def version(self, model: Model, number: str | None) -> int | None:
        """The version that a request names; None if it names none. Raises NotFound."""
        if number in (None, ""):
            return None
        if model.pipeline is not None and number == "1":
            return 1
        if not (number.isascii() and number.isdecimal() and len(number) < 10 and int(number) in model.versions):
            there = ", ".join(map(str, sorted(model.versions) or [1]))
            raise NotFound(f"model {model.name} has no version {number[:20]!r}; loaded are: {there}")
        return int(number)

    async def infer(self, name: str, number: str | None, inputs: Mapping[str, Wire], ask: Ask) -> Answer:
        """Answer a request. Raises HostError."""
        model = self.model(name)
        chosen = self.version(model, number)
        if model.pipeline is not None:
            outputs = await model.pipeline.infer(inputs, ask)
            model.stats.inferences += 1
            return Answer(name, 1, {s.name: wire for s, wire in zip(model.signature.outputs, outputs, strict=True)})
        chosen = model.member() if chosen is None else chosen
        version = model.versions[chosen]
        # The contents of a client's memory may change between two reads.
        fixed = not any(isinstance(wire.data, Part) for wire in inputs.values())
        key = _digest(chosen, inputs) if model.config.cache and not model.config.state and fixed else None
        if key is not None and key in model.cache:
            model.cache.move_to_end(key)
            version.stats.times["cache_hit"].add(0.0)
            version.stats.times["success"].add(0.0)
            return Answer(name, chosen, model.cache[key])
        asked = model.sequences[chosen].infer if chosen in model.sequences else version.infer
        outputs = await asked(inputs, ask)
        named = {spec.name: wire for spec, wire in zip(version.signature.outputs, outputs, strict=True)}
        if key is not None:
            version.stats.times["cache_miss"].add(0.0)
            model.cache[key] = named
            while len(model.cache) > model.config.cache:
                model.cache.popitem(last=False)
        if number in (None, "") and fixed:
            self._shadow(model, inputs, outputs)
        return Answer(name, chosen, named)

    def chosen(self, name: str, number: str | None) -> Version | None:
        """The version that answers a request; None: requests of this model need `infer`. Raises HostError."""
        model = self.models.get(name) or self.model(name)
        chosen = None if number is None else self.version(model, number)
        if not model.plain:
            return None
        return model.versions[model.member() if chosen is None else chosen]

    def steady(self, name: str, number: str | None) -> Version | None:
        """`chosen`, if all requests with this name and number get the same version now. Otherwise, or after an error, None."""
        model = self.models.get(name)
        if model is None or (number is None and model.takes_turns):
            return None
        try:
            return self.chosen(name, number)
        except HostError:
            return None

    async def _step(self, name: str, inputs: Mapping[str, Wire], ask: Ask) -> Mapping[str, Wire]:
        return (await self.infer(name, None, inputs, ask)).outputs

    # ---- versions that share requests

    def _shadow(self, model: Model, inputs: Mapping[str, Wire], outputs: tuple[Wire, ...]) -> None:
        """Let shadow versions compute their share of the requests, and compare the answers."""
        for member in model.config.versions:
            # Chosen at random, not in turns: turns could coincide with those of the versions that answer.
            if member.shadow and random.random() < member.weight and self._shadows < MAX_SHADOWS:
                self._shadows += 1
                self._later(self._compared(model.versions[member.version], dict(inputs), outputs))

    async def _compared(self, version: Version, inputs: dict[str, Wire], given: tuple[Wire, ...]) -> None:
        shadow = version.stats.shadow
        try:
            # Lowest urgency: a shadow must not delay requests that are answered.
            found = await version.infer(inputs, Ask(priority=1 << 30))
            largest = max((differs(one, two) for one, two in zip(given, found, strict=True)), default=0.0)
            shadow.compared += 1
            shadow.different += given != found
            shadow.largest_difference = max(shadow.largest_difference, largest)
        except HostError:
            shadow.failed += 1
        finally:
            self._shadows -= 1


def _digest(version: int, inputs: Mapping[str, Wire]) -> bytes:
    digest = hashlib.blake2b(str(version).encode(), digest_size=32)
    for name in sorted(inputs):
        wire = inputs[name]
        digest.update(f"{name}\0{wire.datatype}\0{wire.shape}\0".encode())
        digest.update(wire.raw)
    return digest.digest()
