"""Profiles, for each block, what a forward pass keeps for its backward pass, and the time that each operation takes to run
again.

`profile` runs the forward pass of a model. It records the tensors that autograd saves, and every call that reaches torch's
dispatcher inside a block, with the memory that the call allocates and the seconds that it takes. Then it runs the forward and
the backward pass once more with every block checkpointed, to see which calls a recomputation really makes: a recomputation
stops at the last saved tensor.

On "meta", nothing is computed. Bytes are then exact for any size, and times come from a function of the call (`seconds_of`).
Memory is counted by storage, so two views of one buffer count once. All storages of the pass are kept alive until it ends. So a
profile on real tensors needs more memory than a training step; use a small model, or "meta".
"""

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import SAC_IGNORED_OPS, checkpoint

__all__ = ["BlockProfile", "Call", "Profile", "SecondsOf", "profile"]

SecondsOf = Callable[[Any, tuple[Any, ...], Any], float]
"""(operator, its arguments, its result) -> seconds."""

_Storages = dict[int, int]
"""Storage -> its size in bytes."""
_HIDDEN = -1
"""Key for memory of which only the number of bytes is known."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call inside a block."""

    name: str
    """Name of the operator, such as "tilewright.linear"."""
    seconds: float
    made: _Storages
    """The storages that the call allocates; empty for a view."""
    again: bool
    """Whether a recomputation of the block runs the call again."""
    may_be_kept: bool
    """False for views, and for results that are later overwritten in place."""

    @property
    def bytes(self) -> int:
        """Number of bytes that the call allocates."""
        return sum(self.made.values())


@dataclass(frozen=True, kw_only=True)
class BlockProfile:
    """One block of a model."""

    calls: tuple[Call, ...]
    inputs: _Storages
    """The storages that a checkpoint of the block keeps."""
    saved: _Storages
    """The storages that autograd keeps if the block is not checkpointed."""

    @property
    def key(self) -> tuple[Any, ...]:
        """The same for all blocks that do the same."""
        calls = tuple((c.name, c.bytes, c.again, c.may_be_kept) for c in self.calls)
        return calls, sum(self.inputs.values()), sum(self.saved.values())


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A whole forward and backward pass."""

    blocks: tuple[BlockProfile, ...]
    outside: _Storages
    """The storages that code outside of the blocks keeps."""
    step_seconds: float
    """Seconds of a forward and backward pass that keeps everything."""


def profile(
    blocks: Sequence[nn.Module], loss: Callable[[], Tensor], *, parameters: Sequence[Tensor],
    seconds_of: SecondsOf | None = None, repeats: int = 3,
) -> Profile:  # fmt: skip
    """Profile a model.

    Args:
        blocks: the modules that may be checkpointed, in the order in which they run. Each must run exactly once.
        loss: () -> a scalar with a gradient. It must always do the same computation.
        parameters: the parameters of the loss. Their memory is not counted, because they exist in any case; nor is that of the
            blocks' buffers.
        seconds_of: returns the time of a call; by default, the time is measured.
        repeats: a measured time is the minimum of this number of runs.

    Raises:
        ValueError: there are no blocks, or they did not run exactly once each, in the given order.
    """
    if not blocks:
        raise ValueError("profile: the list of blocks is empty; give the blocks to plan for")
    watches = [_watch(blocks, loss, parameters, seconds_of) for _ in range(1 if seconds_of else repeats)]
    recomputed = _recomputed(blocks, loss, parameters)
    first = watches[0]
    held = first.outside | {key: size for saved in first.saved for key, size in saved.items()}
    # Memory that operations keep in addition to autograd's saved tensors. For example, a loss may already have computed its
    # gradient.
    hidden = _alive_bytes(loss) - sum(size for key, size in held.items() if key in first.made)
    found = []
    for i in range(len(blocks)):
        runs = [watch.calls[i] for watch in watches]
        calls = [
            Call(
                name=seen.name, seconds=min(run[j].seconds for run in runs), made=seen.made, again=j < recomputed[i],
                may_be_kept=bool(sum(seen.made.values())) and not first.written & seen.made.keys(),
            )
            for j, seen in enumerate(runs[0])
        ]  # fmt: skip
        found.append(BlockProfile(calls=tuple(calls), inputs=first.inputs[i], saved=first.saved[i]))
    if seconds_of is None:
        step = min(_timed(loss, parameters) for _ in range(repeats))
    else:
        # A backward pass does twice the work of a forward pass: one product for the input, and one for the weight.
        step = 3 * (first.outside_seconds + sum(call.seconds for block in found for call in block.calls))
    return Profile(blocks=tuple(found), outside=first.outside | {_HIDDEN: max(0, hidden)}, step_seconds=step)


@dataclass
class _Seen:
    """A recorded call."""

    name: str
    seconds: float
    made: _Storages


class _Watch(TorchDispatchMode):
    """Records what happens in each block of one forward pass."""

    def __init__(self, count: int, seconds_of: SecondsOf | None) -> None:
        super().__init__()
        self.calls: list[list[_Seen]] = [[] for _ in range(count)]
        self.inputs: list[_Storages] = [{} for _ in range(count)]
        self.saved: list[_Storages] = [{} for _ in range(count)]
        self.outside: _Storages = {}
        self.outside_seconds = 0.0
        self.written: set[int] = set()
        self.made: set[int] = set()
        self.block: int | None = None
        self.ran: list[int] = []
        self._seconds_of = seconds_of
        self._held: list[Any] = []  # keeps storages alive, because their addresses identify them

    def storages(self, values: Any) -> _Storages:
        """The storages of all tensors in `values`."""
        found = {}
        for t in tree_leaves(values):
            if isinstance(t, Tensor):
                storage = t.untyped_storage()
                self._held.append(storage)
                found[storage._cdata] = storage.nbytes()
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        start = _now(args)
        out = func(*args, **kwargs)
        seconds = self._seconds_of(func, args, out) if self._seconds_of else _now(args) - start
        if func in SAC_IGNORED_OPS:
            return out
        taken = self.storages((args, kwargs))
        for value, argument in zip(args, func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.written |= self.storages(value).keys()
        made = {key: size for key, size in self.storages(out).items() if key not in taken}
        self.made |= made.keys()
        if self.block is not None:
            name = str(func).removesuffix(".default")
            self.calls[self.block].append(_Seen(name, seconds, made))
        else:
            self.outside_seconds += seconds
        return out


def _now(args: Any) -> float:
    if any(isinstance(a, Tensor) and a.is_cuda for a in args):
        torch.cuda.synchronize()
    return time.perf_counter()


def _watch(
    blocks: Sequence[nn.Module], loss: Callable[[], Tensor], parameters: Sequence[Tensor], seconds_of: SecondsOf | None
) -> _Watch:  # fmt: skip
    watch = _Watch(len(blocks), seconds_of)
    buffers = [buffer for block in blocks for buffer in block.buffers()]
    weights = watch.storages([*parameters, *buffers]).keys()

    def pack(t: Tensor) -> Tensor:
        found = {key: size for key, size in watch.storages(t).items() if key not in weights}
        (watch.outside if watch.block is None else watch.saved[watch.block]).update(found)
        return t

    def enter(i: int, args: Any, kwargs: Any) -> None:
        watch.block = i
        watch.ran.append(i)
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        watch.inputs[i].update({key: size for key, size in watch.storages(given).items() if key not in weights})

    def leave(i: int) -> None:
        watch.block = None

    hooks = []
    for i, block in enumerate(blocks):
        hooks.append(block.register_forward_pre_hook(lambda m, args, kwargs, i=i: enter(i, args, kwargs), with_kwargs=True))
        hooks.append(block.register_forward_hook(lambda m, args, out, i=i: leave(i)))
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), watch:
            result = loss()
        del result
    finally:
        for hook in hooks:
            hook.remove()
    if watch.ran != list(range(len(blocks))):
        raise ValueError(f"profile: blocks ran in the order {watch.ran}, but each must run exactly once, in the order given")
    return watch


class _Alive(TorchDispatchMode):
    """Records the storages that calls have allocated and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: _Storages = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and (key := t.untyped_storage()._cdata) not in given and key not in self.sizes:
                self.sizes[key] = t.untyped_storage().nbytes()
                weakref.finalize(t.untyped_storage(), self.sizes.pop, key, None)
        return out


def _alive_bytes(loss: Callable[[], Tensor]) -> int:
    """The number of bytes that a forward pass has allocated and that are still alive at its end."""
    with _Alive() as alive:
        result = loss()
        found = sum(alive.sizes.values())
    del result
    return found


class _Counter(TorchDispatchMode):
    """Counts calls in the same way as selective checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func not in SAC_IGNORED_OPS
        return func(*args, **(kwargs or {}))


def _recomputed(blocks: Sequence[nn.Module], loss: Callable[[], Tensor], parameters: Sequence[Tensor]) -> list[int]:
    """For each block, the number of calls that a full recomputation makes: those up to the last saved tensor."""
    counters = [_Counter() for _ in blocks]
    # The outer mode sends all calls to the dispatcher. So on "meta", the shapes of results are found even for operators whose
    # definition would read values.
    with _Counter(), _wrapped(blocks, [lambda counter=counter: (nullcontext(), counter) for counter in counters]):
        _gradients(loss(), parameters)
    return [counter.calls for counter in counters]


@contextmanager
def _wrapped(blocks: Sequence[nn.Module], contexts: Sequence[Callable[[], Any]]) -> Iterator[None]:
    """Within this context, each block is checkpointed with its entry of `contexts`."""
    for block, context in zip(blocks, contexts, strict=True):
        forward = block.forward
        # On "meta" nothing is random, and there is no random number generator whose state could be kept.
        keep = not any(p.is_meta for p in block.parameters())
        block.forward = lambda *args, forward=forward, context=context, keep=keep, **kwargs: checkpoint(
            forward, *args, use_reentrant=False, context_fn=context, preserve_rng_state=keep, **kwargs
        )
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def _gradients(result: Tensor, parameters: Sequence[Tensor]) -> None:
    torch.autograd.grad(result, list(parameters), allow_unused=True)


def _timed(loss: Callable[[], Tensor], parameters: Sequence[Tensor]) -> float:
    start = _now(list(parameters))
    _gradients(loss(), parameters)
    return _now(list(parameters)) - start
