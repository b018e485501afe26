"""The LoRA adapters of an engine's model: by name for requests, by number for the layers.

There is room for a fixed number of adapters with a fixed maximum rank, so that loading an adapter neither allocates memory on
the device nor compiles a kernel. New requests can no longer use a name once it is removed. Its place becomes free when the last
request that uses it has ended. Reading a folder (`read`) is possible in any thread; everything else must run in the engine's
thread, between two steps. Memory that a step in flight reads is never written, and the device runs copies after that step.
"""

import itertools
from collections.abc import Callable, Collection
from hashlib import sha256
from pathlib import Path

from tilewright.engine.adapter_names import Held, UnknownAdapter, check_name, named_folders
from tilewright.engine.config import EngineConfig
from tilewright.models import Model, ModelError
from tilewright.models.adapters import Adapter, Target, read_adapter, targets_of
from tilewright.nn import Linear, LoraStack

__all__ = ["Adapters", "adapter_bytes", "beside", "held_adapters", "read_adapters"]


def beside(model: Model, options: EngineConfig) -> None:
    """Add room for adapters, as the options specify, to the layers of a model, which may be on "meta".

    Raises:
        ModelError: the model does not support adapters.
    """
    if not options.adapter_places:
        return
    for path in sorted({target.path for target in targets_of(model).values()}):
        layer = model.get_submodule(path)
        assert isinstance(layer, Linear)
        layer.adapter = LoraStack(
            layer.parts, layer.weight.shape[1], adapters=options.adapter_places, rank=options.max_adapter_rank,
            device=layer.weight.device, dtype=model.embed.weight.dtype,
        )  # fmt: skip


def adapter_bytes(model: Model) -> int:
    """Bytes of the room for adapters in a model."""
    stacks = [module for module in model.modules() if isinstance(module, LoraStack)]
    return sum(buffer.nbytes for stack in stacks for buffer in stack.buffers())


class Adapters:
    """The adapters of a model that was prepared by `beside`.

    Args:
        adapters, rank: the same number of adapters and maximum rank as for `beside`.
    """

    def __init__(self, model: Model, adapters: int, rank: int):
        self.most, self.rank = adapters, rank
        self.targets: dict[str, Target] = targets_of(model)
        self._stacks = {path: model.get_submodule(path) for path in {target.path for target in self.targets.values()}}
        self._held: dict[str, Held] = {}
        self._serials = itertools.count()

    @property
    def names(self) -> Collection[str]:
        """Names that requests may use, in the order of loading."""
        return tuple(self._held)

    def get(self, name: str) -> Held:
        """The adapter with this name. Raises UnknownAdapter."""
        found = self._held.get(name)
        if found is None:
            known = f"there are {', '.join(list(self._held)[:8])}" if self._held else "none is loaded"
            raise UnknownAdapter(f"there is no adapter {name[:200]!r} here; {known}")
        return found

    def read(self, folder: str | Path) -> Adapter:
        """The adapter in a folder, checked. Raises ModelError."""
        return read_adapter(folder, self.targets, max_rank=self.rank)

    def put(self, name: str, adapter: Adapter, folder: str, in_use: Callable[[], Collection[int]]) -> Held:
        """Load an adapter under a name. in_use: returns the adapter numbers of unfinished requests.

        Raises:
            ValueError: the name is taken or not valid, or no place is free.
        """
        check_name(name)
        if name in self._held:
            raise ValueError(f"there is an adapter {name!r} already: unload it first, or take another name")
        taken = {held.number for held in self._held.values()} | set(in_use())
        free = next((number for number in range(1, self.most + 1) if number not in taken), None)
        if free is None:
            raise ValueError(f"{self.most} adapters are held or still in use, and there is room for no more: unload one")
        self._write(free, adapter)
        salt = sha256(f"adapter {next(self._serials)} {name}".encode()).digest()
        held = self._held[name] = Held(name=name, folder=folder, number=free, salt=salt)
        return held

    def remove(self, name: str) -> None:
        """Remove a name. Unfinished requests that use the adapter continue with it to their end. Raises UnknownAdapter."""
        self.get(name)
        del self._held[name]

    def _write(self, number: int, adapter: Adapter) -> None:
        for path, layer in self._stacks.items():
            assert isinstance(layer, Linear)
            assert isinstance(layer.adapter, LoraStack)
            found = {self.targets[name]: pair for name, pair in adapter.pairs.items() if self.targets[name].path == path}
            pairs = {target.part: (pair.a, pair.b) for target, pair in found.items()}
            layer.adapter.put(number - 1, pairs, {target.part: pair.scale for target, pair in found.items()})


Read = list[tuple[str, Path, Adapter]]
"""(name, folder, content) of adapters."""


def read_adapters(model: Model, options: EngineConfig) -> Read:
    """Read the adapters that the options name, for a model that may be on "meta".

    Raises:
        ModelError: an adapter cannot be used; the message names it.
        ValueError: an entry of `adapters` is not NAME=FOLDER.
    """
    found = []
    for name, folder in named_folders(options.adapters or ()).items():
        try:
            found.append((name, folder, read_adapter(folder, targets_of(model), max_rank=options.max_adapter_rank)))
        except ModelError as error:
            raise ModelError(f"adapter {name}: {error}") from error
    return found


def held_adapters(model: Model, options: EngineConfig, read: Read) -> Adapters | None:
    """The adapters of a loaded model, including those in `read`; None if the options specify no room for adapters."""
    beside(model, options)
    if not options.adapter_places:
        return None
    adapters = Adapters(model, options.adapter_places, options.max_adapter_rank)
    for name, folder, adapter in read:
        adapters.put(name, adapter, str(folder), tuple)
    return adapters
