"""Operators, their implementations, and the one place that chooses between implementations.

An `Op` has a definition in plain torch (`reference`), a cost, examples, and a tuple of `Impl`s, best first. A call runs

    public function -> Op.__call__ -> choose(problem, device, scope) -> Impl.launch(config, *args)

`choose` sees only the `problem`, a small hashable summary of the arguments (`Op.problem`), never the arguments themselves.
So its answer can be cached. Among the implementations that do not refuse the problem, it selects the one that the measured
record names, with that record's config (`tune.lookup`). Without a record it selects the first one, with its default config;
`Op.first` may name another. A refusal is a sentence; error messages, `explain` and skipped tests all show that sentence.

In plain eager code the call goes straight to the launcher. While torch.compile traces, or a dispatch mode is active (fake
tensors, a profiler, opcheck), it goes through torch's dispatcher, where the op is registered as `tilewright::<name>`. So does
a call with tensors that have no memory of their own: subclasses, and tensors of `torch.func` and of batched gradients (these
run one by one). Inside such a transform, an op that writes in place runs its reference.
`torch.autocast` has no effect on ops: their results have the documented dtypes.
For CPU tensors the reference runs; under Triton's interpreter the Triton implementations run.

This module has no kernels and imports none, does not search for configs, and has no autograd. Ops are forward only: a call
that would need a gradient raises instead of returning a tensor without history.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from difflib import get_close_matches
from inspect import signature
from typing import Any, Concatenate, NamedTuple, ParamSpec

import torch
from torch import Tensor

from tilewright.hw.device import Device, device_of
from tilewright.hw.here import as_given, autocasts, away, dispatch_modes, stands_for_many, transforms
from tilewright.hw.roofline import Cost
from tilewright.tune import lookup
from tilewright.tune.model import Work
from tilewright.tune.ranking import Entry
from tilewright.tune.space import NO_CHOICES, Config, Space

__all__ = [
    "Args", "Choice", "Example", "Impl", "Inputs", "Op", "Refused", "Scope", "early_launches", "invariant",
    "launch", "on_card", "prefer", "scope", "strict",
]  # fmt: skip

P = ParamSpec("P")
Args = tuple[Any, ...]  # the arguments of a call

_LIBRARY = torch.library.Library("tilewright", "DEF")
_NAMES: set[str] = {"reference"}
"""Names of the implementations of all ops."""
_CPU_IS_CPU = not device_of(-1).runs_triton


class Refused(ValueError):
    """No implementation accepts this problem on this device; the message lists the reason for each implementation."""


class Scope(NamedTuple):
    """The settings of `prefer`, `invariant`, `strict`, `on_card` and `early_launches`; part of every cache key."""

    preferred: str | None = None
    invariant: bool = False
    strict: bool = False
    card: Device | None = None
    early: bool = False


_SCOPE: ContextVar[Scope] = ContextVar("tilewright_scope", default=Scope())  # noqa: B039 (a NamedTuple is immutable)


def scope() -> Scope:
    """The scope that is active in this thread."""
    return _SCOPE.get()


@contextmanager
def _scoped(**changes: Any) -> Iterator[None]:
    token = _SCOPE.set(_SCOPE.get()._replace(**changes))
    try:
        yield
    finally:
        _SCOPE.reset(token)


def prefer(name: str) -> Any:
    """`with prefer("triton"):` uses the implementation of that name in every op that has it, unless it refuses the call.

    Raises:
        ValueError: no op has an implementation of that name.
    """
    if name not in _NAMES:
        close = get_close_matches(name, _NAMES, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        raise ValueError(f"prefer: no op has an implementation called {name!r}: {hint}there are {', '.join(sorted(_NAMES))}")
    return _scoped(preferred=name)


def invariant() -> Any:
    """`with invariant():` allows only implementations whose bits for a row do not depend on the other rows of the batch."""
    return _scoped(invariant=True)


def strict() -> Any:
    """`with strict():` raises `tune.lookup.NoRecord` where there is a choice to make for a problem that was never measured."""
    return _scoped(strict=True)


def on_card(card: Device) -> Any:
    """`with on_card(device_named("h100")):` ops treat meta tensors as tensors on that card, and choose and launch accordingly.

    Used to record launches (`asm.compile.compile_only`). Without a recording, a launch on meta tensors fails.
    """
    return _scoped(card=card)


def early_launches() -> Any:
    """`with early_launches():` lets launches for a single row start while the preceding launch still runs.

    They wait for the preceding launch before they read its results. Products, however, load parameters (weights and biases)
    before this wait. So the caller promises that nothing launched inside writes parameters. The results have the same bits
    (kernels/hopper/early.py).
    """
    return _scoped(early=True)


@dataclass(frozen=True, kw_only=True)
class Impl:
    """One way to compute an op.

    `launch(config, *args)` allocates, launches and returns; `args` are the same as for the reference.
    `refuse(device, problem)` returns the reason why this problem cannot run there, or None.
    `batch_invariant`: the bits of a row depend neither on the other rows nor on their number.
    """

    name: str
    launch: Callable[..., Any]
    space: Space = NO_CHOICES
    min_arch: int = 80
    written_for: int | None = None
    """The only architecture that it is written for (90: Hopper); replaces `min_arch`. None: it is portable."""
    refuse: Callable[[Device, Any], str | None] = lambda device, problem: None
    batch_invariant: bool = False
    interpretable: bool | None = None
    """Whether Triton's interpreter can run it. None: yes, unless it calls a library or is written for one architecture."""
    extra_roundings: int = 0
    """Roundings to the arguments' dtype in addition to those of the op, for example by a library before our epilogue."""
    library: bool = False
    """Whether it calls the library that torch would call."""
    releases: bool = False
    """Whether it lets the next launch start early (kernels/launch/pdl.py)."""
    plan: Callable[..., Any] | None = None
    """(config, *args) -> a plan that repeats this call on other tensors, which may differ from these only in their addresses
    (kernels/launch/plan.py); None: there is no plan. The kernel's folder documents the operands that a plan runs on."""
    work: Callable[..., Work] | None = None
    """(device, config, *args) -> the work that a launch really does, for the analytical model; None: no prediction.

    The arguments may be meta tensors; the entries of the config may be arrays (`tune.model.Work`)."""

    def refusal(self, device: Device, problem: Any, scope: Scope = Scope()) -> str | None:  # noqa: B008
        """Why this implementation does not accept the problem on this device, or None if it does."""
        if not device.runs_triton:
            return "needs a GPU, or TRITON_INTERPRET=1"
        own = self.interpretable
        if device.kind == "interpret" and not (own if own is not None else not self.library and self.written_for is None):
            return "cannot run under Triton's interpreter"
        least = self.written_for or self.min_arch
        if device.arch < least:
            return f"needs sm_{least}, this is sm_{device.arch}"
        if scope.invariant and not self.batch_invariant:
            return "is not batch-invariant"
        if self.written_for is not None and device.arch != self.written_for:
            return f"is written for sm_{self.written_for}, this is sm_{device.arch}"
        return self.refuse(device, problem)


class Inputs:
    """Random arguments, drawn on the CPU from a seed, so that every device gets the same numbers.

    With `here` they are drawn on the device itself. This is faster for large tensors, but gives different numbers. On "meta"
    nothing is drawn: tensors have only shapes, dtypes and strides.
    """

    def __init__(self, device: str | torch.device = "cpu", seed: int = 0, *, here: bool = False):
        self.device = torch.device(device)
        self._meta = self.device.type == "meta"
        self._generator = None if self._meta else torch.Generator(self.device if here else "cpu").manual_seed(seed)
        self._source = self.device if here or self._meta else torch.device("cpu")

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        """Normal numbers with standard deviation `scale`."""
        if self._meta:
            return torch.empty(shape, dtype=dtype, device="meta")
        return torch.randn(*shape, generator=self._generator, device=self._source).mul_(scale).to(dtype).to(self.device)

    def randint(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Integers in [low, high)."""
        if self._meta:
            return torch.empty(shape, dtype=dtype, device="meta")
        return torch.randint(low, high, shape, generator=self._generator, device=self._source).to(dtype).to(self.device)

    def permutation(self, n: int) -> Tensor:
        """The integers below `n` in random order, int64."""
        if self._meta:
            return torch.empty(n, dtype=torch.int64, device="meta")
        return torch.randperm(n, generator=self._generator, device=self._source).to(self.device)

    def tensor(self, values: Any, dtype: torch.dtype) -> Tensor:
        """A tensor with exactly these values."""
        return torch.tensor(values, dtype=dtype, device=self.device)


class Example(NamedTuple):
    """A named call of an op, used by conformance tests, certificates and tuning."""

    label: str
    make: Callable[[Inputs], Args]

    @staticmethod
    def of(make: Callable[Concatenate[Inputs, P], Args]) -> Callable[Concatenate[str, P], "Example"]:
        """A decorator for make(inputs, ...) -> arguments. The decorated function accepts a label instead of `inputs` and
        returns an example."""
        return lambda label, *args, **kwargs: Example(label, lambda inputs: make(inputs, *args, **kwargs))

    @staticmethod
    def sized(make: Callable[..., Args]) -> Callable[..., "Example"]:
        """Wraps an op's `make`. Call the result with a label, values for `make`'s first keywords in order, others by name."""
        names = [*signature(make).parameters][1:]
        return lambda label, *sizes, **more: Example.of(make)(label, **dict(zip(names, sizes, strict=False)), **more)

    def then(self, more: Callable[..., Args]) -> "Example":
        """An example of another op. Its arguments are `more(inputs, *arguments)`, where `arguments` are those of this one."""
        return Example(self.label, lambda inputs: more(inputs, *self.make(inputs)))


class Choice(NamedTuple):
    """The implementation and config that a call will run."""

    impl: Impl
    config: Config
    source: str = "fixed"
    """Where the choice comes from: "exact", "bucket" or "default"; "fixed" if there is nothing to choose or no card."""
    entry: Entry | None = None
    """The measured row behind "exact" and "bucket"."""


@dataclass(eq=False, kw_only=True)
class Op:
    """An operator. Give `reference` full type annotations: torch's schema is read from them.

    - `problem(*args)`: a hashable summary with everything that a refusal or a default config may depend on.
    - `cost(*args)`: the work that any implementation has to do.
    - `make(inputs, *, M, N, dtype=torch.bfloat16, ...)`: arguments from dimensions. `tune`, `explain` and `bench` accept its
      keywords for this op: ints for sizes, a `torch.dtype` for a dtype, `str` and `bool` for choices. The data must be random,
      never zeros: with zeros a card draws less power and runs faster. With `Inputs("meta")` nothing is allocated.
    - `first(device, problem)`: the name of the implementation to try first for this problem, or None to keep their order.
    - `fake(*args)`: outputs of the right shape and dtype for tracing. None: the reference, which then must not read values.
    - `mutates`: the names of the arguments that are written in place.
    - `rows_in_problem`: the problem contains the number of rows of the batch. In the invariant scope measured records are then
      ignored: two batches could get two configs, and with them different bits for the same row.
    - `roundings`: how often a value is rounded to the arguments' dtype before it becomes a result. The error limits of the
      conformance tests grow with it (attention rounds the weights of its average, then the average).
    - `codes_may_move`: the op quantises its result, so a different last bit may give the neighbouring quantised value. It is
      compared with the reference in the arguments' own dtypes, because rounding before quantising is part of the definition.
    - `codes_inside`: the op quantises intermediate values and returns a 16-bit result. A different last bit may move such a
      value by one step (in e4m3 an eighth of it). This affects single elements: the largest error may be an eighth of the
      reference's largest element; the limit on the RMS error is the usual one.
    - `tolerance`: tighter conformance limits: dtype -> (max error, RMS error), both relative to the RMS of the oracle.
    """

    name: str
    reference: Callable[..., Any]
    problem: Callable[..., Any]
    cost: Callable[..., Cost]
    examples: tuple[Example, ...]
    impls: tuple[Impl, ...]
    make: Callable[..., Args] | None = None
    first: Callable[[Device, Any], str | None] = lambda device, problem: None
    fake: Callable[..., Any] | None = None
    mutates: tuple[str, ...] = ()
    rows_in_problem: bool = False
    roundings: int = 1
    codes_may_move: bool = False
    codes_inside: bool = False
    tolerance: dict[torch.dtype, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._choices: dict[Any, Choice] = {}
        self.generation = 0
        """How often the cached choices were cleared; part of the keys of caches that depend on them."""
        reference = self.reference
        self._reference = Choice(Impl(name="reference", launch=lambda config, *args: reference(*args)), {})
        _NAMES.update(impl.name for impl in self.impls)
        _LIBRARY.define(self.name + torch.library.infer_schema(self.reference, mutates_args=self.mutates))
        for key in ("CPU", "CUDA"):
            _LIBRARY.impl(self.name, self.run, key)
        torch.library.register_fake(f"tilewright::{self.name}", as_given(self.fake or self.reference), lib=_LIBRARY)
        self.dispatched = getattr(torch.ops.tilewright, self.name).default

    def __call__(self, *args: Any) -> Any:
        """Run the op. The first argument must be a tensor; its device is the device of the call.

        Raises:
            Refused: no implementation accepts this problem on this device.
            RuntimeError: an input requires a gradient.
        """
        if torch.compiler.is_compiling() or dispatch_modes() or not _PLAIN.issuperset(map(type, args)):
            return self.dispatched(*args)
        if transforms():  # the dispatcher has no rule for an op that writes in place
            return self.reference(*args) if self.mutates else self.dispatched(*args)
        if torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args):
            raise RuntimeError(f"{self.name} is forward only: call it under torch.inference_mode() or torch.no_grad()")
        try:
            return self.run(*args)
        except RuntimeError:
            if not any(isinstance(a, Tensor) and stands_for_many(a) for a in args):
                raise
            return self.dispatched(*args)  # `is_grads_batched=True`: too rare to be checked on every call

    def run(self, *args: Any) -> Any:
        """Choose and launch on the card of the first argument, without torch's dispatcher."""
        if autocasts():  # torch's operators in references and launchers must keep the dtypes of their arguments
            with torch._C._DisableAutocast():
                return self.run(*args)
        index = args[0].get_device()
        if index < 0 and _CPU_IS_CPU:
            if not args[0].is_meta or _SCOPE.get().card is None:
                return self.reference(*args)  # the choice that `choose` would make, without computing the problem
        elif away(index):
            with torch.cuda.device(index):
                return self.run(*args)
        problem = self.problem(*args)
        key = (problem, index, _SCOPE.get())
        choice = self._choices.get(key)
        if choice is None:
            choice = self._choices[key] = self.choose(key[2].card or device_of(index), problem)
        return choice.impl.launch(choice.config, *args)

    def forget(self) -> None:
        """Choose again at the next call of each problem, because the measured records have changed (`tune.lookup.refresh`)."""
        self._choices.clear()
        self.generation += 1

    def chosen_impls(self) -> list[Impl]:
        """The implementations that `run` has chosen since the choices were last cleared, on any device, each once."""
        return list({choice.impl.name: choice.impl for choice in self._choices.values()}.values())

    def chosen(self, *args: Any) -> Choice:
        """The choice that `run` has made for such arguments in the active scope. Raises KeyError if there was no such run."""
        return self._choices[self.problem(*args), args[0].get_device(), _SCOPE.get()]

    def choice_for(self, *args: Any) -> Choice:
        """The choice that a call with these arguments would make."""
        return self.choose(device_of(args[0].get_device()), self.problem(*args))

    def choose(self, device: Device, problem: Any) -> Choice:
        """The implementation and config for a problem in the active scope. Raises `Refused` if there is none."""
        now = scope()
        if device.kind == "cpu" or now.preferred == "reference":
            return self._reference
        allowed = [impl for impl in self.impls if impl.refusal(device, problem, now) is None]
        if not allowed:
            reasons = "".join(f"\n  {name}: {reason}" for name, reason in self.refusals(device, problem).items())
            raise Refused(f"{self.name}: no implementation takes {problem} on {device.name}:{reasons}")
        first = self.first(device, problem)
        allowed.sort(key=lambda impl: impl.name != first)
        impls = [impl for impl in allowed if impl.name == now.preferred] or allowed
        default = Choice(impls[0], impls[0].space.default(device, problem))
        nothing_to_choose = len(impls) == 1 and not impls[0].space.axes
        if device.kind != "cuda" or nothing_to_choose or (now.invariant and self.rows_in_problem):
            return default
        found = lookup.find(self.name, problem, device, now.invariant, impls)
        if now.strict and (found is None or found.source != "exact"):
            raise lookup.missing(self.name, problem, device)
        if found is None:
            lookup.count_default()
            return default._replace(source="default")
        return Choice(next(impl for impl in impls if impl.name == found.impl), found.config, found.source, found.entry)

    def refusals(self, device: Device, problem: Any) -> dict[str, str]:
        """Implementation name -> reason, for the implementations that refuse the problem."""
        reasons = {impl.name: impl.refusal(device, problem, scope()) for impl in self.impls}
        return {name: reason for name, reason in reasons.items() if reason is not None}


def launch(impl: Impl, config: Config, args: Args) -> Any:
    """Call `impl.launch` on the card of the first argument, for a choice that was made earlier."""
    index = args[0].get_device()
    if not away(index):
        return impl.launch(config, *args)
    with torch.cuda.device(index):
        return impl.launch(config, *args)


_PLAIN = frozenset({
    Tensor, torch.nn.Parameter, type(None), bool, int, float, str, list, tuple, torch.Size, torch.dtype, torch.device,
})  # fmt: skip
"""Argument types that a launcher can read directly. Tensor subclasses (they may have no memory) and symbols are excluded."""
