"""A loaded model, and the choice of the version that answers."""

from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tilewright.host.config import Member, ModelConfig
from tilewright.host.pipeline import Pipeline
from tilewright.host.sequences import Sequences
from tilewright.host.stats import Stats
from tilewright.host.tensors import Signature, Wire
from tilewright.host.version import Version

__all__ = ["Answer", "Model", "Source"]


class Source(NamedTuple):
    """A model named on the command line."""

    config: ModelConfig
    folder: Path | None


class Answer(NamedTuple):
    """The answer to a request."""

    model: str
    version: int
    outputs: dict[str, Wire]


@dataclass
class Model:
    """A model that is loaded."""

    name: str
    config: ModelConfig
    signature: Signature
    versions: dict[int, Version] = field(default_factory=dict)
    marks: dict[int, str] = field(default_factory=dict)
    sequences: dict[int, Sequences] = field(default_factory=dict)
    pipeline: Pipeline | None = None
    stats: Stats = field(default_factory=Stats)
    """The signature of a pipeline."""
    cache: OrderedDict[bytes, dict[str, Wire]] = field(default_factory=OrderedDict)
    credit: dict[int, float] = field(default_factory=dict)
    plain: bool = False
    """Whether requests need only a version's answer: there is no pipeline, cache, sequence or shadow."""

    def __post_init__(self) -> None:
        config = self.config
        self.plain = self.pipeline is None and not (config.cache or config.state or any(m.shadow for m in config.versions))

    @property
    def newest(self) -> int:
        """The highest version."""
        return max(self.versions, default=1) if len(self.versions) != 1 else next(iter(self.versions))

    @property
    def ready(self) -> bool:
        """Whether the version that answers by default accepts requests."""
        return self.pipeline is not None or any(version.ready for version in self.versions.values())

    @property
    def takes_turns(self) -> bool:
        """Whether several versions answer the requests that name none."""
        return len([member for member in self.config.versions if not member.shadow and member.weight > 0]) > 1

    def member(self) -> int:
        """The version that answers the next request that names none. Each version gets its share, spread evenly."""
        if not self.config.versions:
            return self.newest
        members = [member for member in self.config.versions if not member.shadow and member.weight > 0]
        if len(members) < 2:
            return members[0].version if members else self.newest
        return _next(self.credit, members)


def _next(credit: dict[int, float], members: list[Member]) -> int:
    """Smooth weighted round robin: each member gains its weight; the member with the most credit is chosen and pays the sum."""
    for member in members:
        credit[member.version] = credit.get(member.version, 0.0) + member.weight
    chosen = max(members, key=lambda member: credit[member.version])
    credit[chosen.version] -= sum(member.weight for member in members)
    return chosen.version
