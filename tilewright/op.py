"""Operations, their implementations, and the one place that chooses between them.

An `Op` is a definition in plain torch (`reference`), what it costs, examples, and a tuple of `Impl`s, best first. A call goes

    public function -> Op.__call__ -> choose(problem, device, scope) -> Impl.launch(config, *args)

`choose` sees the `problem`, a small hashable summary of the arguments (`Op.problem`), never the arguments themselves: that
makes its answer cacheable by construction. Of the implementations that do not refuse it takes the one that a measured row
names, with that row's config (`tune.lookup`); else the first with its default (`Op.first` may name it by the problem). A
refusal is a sentence, and that sentence is the error text, the explanation and the skip message of the tests.

In plain eager code the call goes straight to the launcher. While torch.compile traces, or a dispatch mode (fake tensors,
a profiler, opcheck) is on, it goes through torch's dispatcher, where the same op is registered as `tilewright::<name>`. So
do tensors without memory of their own: subclasses, those of `torch.func` and of batched gradients, one by one. An op that
writes in place is its definition in such a transform.
`torch.autocast` does not reach into ops: their results have the dtypes that they promise.
CPU tensors take the reference, or the Triton implementations under Triton's interpreter.

Not here: kernels (this module imports none), searching for configs, autograd. Ops are forward only; a call that would need
a gradient raises instead of returning a tensor without history.
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
    "Args",
    "Choice",
    "Example",
    "Impl",
    "Inputs",
    "Op",
    "Refused",
    "Scope",
    "invariant",
    "launch",
    "on_card",
    "prefer",
    "scope",
    "strict",
]

P = ParamSpec("P")
Args = tuple[Any, ...]  # of a call of an op

_LIBRARY = torch.library.Library("tilewright", "DEF")
_NAMES: set[str] = {"reference"}
"""Of the implementations of all ops that were made."""
_CPU_IS_CPU = not device_of(-1).runs_triton


class Refused(ValueError):
    """No implementation takes this problem on this device; the message lists each one's reason."""


class Scope(NamedTuple):
    """What `prefer`, `invariant`, `strict` and `on_card` set; part of every cache key."""

    preferred: str | None = None
    invariant: bool = False
    strict: bool = False
    card: Device | None = None


_SCOPE: ContextVar[Scope] = ContextVar("tilewright_scope", default=Scope())  # noqa: B039 (a NamedTuple is immutable)


def scope() -> Scope:
    """The scope in force in this thread."""
    return _SCOPE.get()


@contextmanager
def _scoped(**changes: Any) -> Iterator[None]:
    token = _SCOPE.set(_SCOPE.get()._replace(**changes))
    try:
        yield
    finally:
        _SCOPE.reset(token)


def prefer(name: str) -> Any:
    """`with prefer("triton"):` takes the implementation of that name wherever an op has one and it does not refuse.

    Raises:
        ValueError: no op has an implementation of that name.
    """
    if name not in _NAMES:
        close = get_close_matches(name, _NAMES, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        raise ValueError(f"prefer: no op has an implementation called {name!r}: {hint}there are {', '.join(sorted(_NAMES))}")
    return _scoped(preferred=name)


def invariant() -> Any:
    """`with invariant():` allows only implementations whose rows do not depend on the other rows of a batch, bitwise."""
    return _scoped(invariant=True)


def strict() -> Any:
    """`with strict():` raises `tune.lookup.NoRecord` for a problem that has something to choose and was never measured."""
    return _scoped(strict=True)


def on_card(card: Device) -> Any:
    """`with on_card(device_named("h100")):` ops take meta tensors for tensors of that card, and choose and launch as there.

    For recording launches (`asm.compile.compile_only`); without a recording a launch on meta tensors fails.
    """
    return _scoped(card=card)


@dataclass(frozen=True, kw_only=True)
class Impl:
    """One way to compute an op.

    `launch(config, *args)` allocates, launches and returns; it takes the op's arguments as the reference does.
    `refuse(device, problem)` gives the reason why this problem cannot run there, else None.
    `batch_invariant`: a row's bits do not depend on the other rows, nor on how many there are.
    """

    name: str
    launch: Callable[..., Any]
    space: Space = NO_CHOICES
    min_arch: int = 80
    written_for: int | None = None
    """The one architecture whose instructions it is made of (90: Hopper), in the place of `min_arch`; None: it is portable."""
    refuse: Callable[[Device, Any], str | None] = lambda device, problem: None
    batch_invariant: bool = False
    interpretable: bool | None = None
    """Whether Triton's interpreter can run it. None: unless it is a library's, or made of one architecture's instructions."""
    extra_roundings: int = 0
    """Roundings to the arguments' dtype beyond the op's own: a library's, before the epilogue that we add to it."""
    library: bool = False
    """Whether it is a call of the library that torch would take."""
    releases: bool = False
    """Whether it lets the launch behind it start early (kernels/launch/pdl.py)."""
    plan: Callable[..., Any] | None = None
    """(config, *args) -> the plan of a call that was made with these arguments, which makes it again on tensors that differ in
    their memory alone (kernels/launch/plan.py); None where there is none. What it is run on is the wing's to say."""
    work: Callable[..., Work] | None = None
    """(device, config, *args) -> what a launch really does, for the analytical model; None: it is not predicted.

    The arguments may be meta tensors; the entries of the config may be arrays (`tune.model.Work`)."""

    def refusal(self, device: Device, problem: Any, scope: Scope = Scope()) -> str | None:  # noqa: B008
        """Why this implementation does not take the problem on this device, or None when it does."""
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
    """Random arguments: drawn on the CPU from a seed, so that every device gets the same numbers.

    With `here` they are drawn on the device itself: other numbers, and no time lost where there are many. On "meta" nothing is
    drawn: shapes, dtypes and strides alone.
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
        """These very values."""
        return torch.tensor(values, dtype=dtype, device=self.device)


class Example(NamedTuple):
    """A named call of an op: what conformance, certificates and tuning run."""

    label: str
    make: Callable[[Inputs], Args]

    @staticmethod
    def of(make: Callable[Concatenate[Inputs, P], Args]) -> Callable[Concatenate[str, P], "Example"]:
        """Decorate make(inputs, ...) -> arguments: called with a label in the place of the inputs it gives an example."""
        return lambda label, *args, **kwargs: Example(label, lambda inputs: make(inputs, *args, **kwargs))

    @staticmethod
    def sized(make: Callable[..., Args]) -> Callable[..., "Example"]:
        """By an op's `make`: called with a label, sizes for its first keywords in their order, and others by name."""
        names = [*signature(make).parameters][1:]
        return lambda label, *sizes, **more: Example.of(make)(label, **dict(zip(names, sizes, strict=False)), **more)

    def then(self, more: Callable[..., Args]) -> "Example":
        """Of another op: more(inputs, *these arguments) are its arguments."""
        return Example(self.label, lambda inputs: more(inputs, *self.make(inputs)))


class Choice(NamedTuple):
    """What a call will run."""

    impl: Impl
    config: Config
    source: str = "fixed"
    """What says so: "exact", "bucket" or "default"; "fixed" when there is nothing to choose, or no card to know."""
    entry: Entry | None = None
    """The measured row behind "exact" and "bucket"."""


@dataclass(eq=False, kw_only=True)
class Op:
    """An operation. Give `reference` full type annotations: torch's schema is read from them.

    `problem(*args)` -> a hashable summary with all that a refusal or a default config may look at.
    `cost(*args)` -> the unavoidable work of the call.
    `make(inputs, *, M, N, dtype=torch.bfloat16, ...)` -> arguments from dimensions: its keywords are what `tune`, `explain` and
    `bench` accept for this op, ints for sizes, a `torch.dtype` for a dtype, `str` and `bool` for choices. Random data, never
    zeros: on zeros a card draws less power and runs faster than it will. With `Inputs("meta")` nothing is allocated.
    `first(device, problem)` -> the name of the implementation to put before the others, or None: for problems where their order
    does not fit.
    `fake(*args)` -> outputs of the right shape and dtype for tracing; the reference unless it looks at values.
    `mutates` names the arguments that are written in place.
    `rows_in_problem`: the problem says how many rows a batch has. Then no row decides in the invariant scope: two batches
    could get two configs, and with them other bits for a row that is in both.
    `roundings`: how often a value is rounded to the arguments' dtype on its way to a result; the limits of conformance grow
    with it (attention rounds the weights of its average, then the average).
    `codes_may_move`: it quantises what it has computed, so a last bit may move a code to its neighbour. Conformance compares it
    with the reference in the arguments' own dtypes, whose rounding before the codes is part of the definition.
    `codes_inside`: it rounds numbers of its own to codes on its way to a 16-bit result: a last bit may move such a number by a
    step, an eighth of itself in e4m3. That shows in single elements: the largest error is held to an eighth of the largest
    element of the definition, the RMS error as anywhere.
    `tolerance` may tighten the conformance limits: dtype -> (max error, RMS error), both relative to the RMS of the oracle.
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
        """How often choices were forgotten: part of the key of what stands on them."""
        reference = self.reference
        self._reference = Choice(Impl(name="reference", launch=lambda config, *args: reference(*args)), {})
        _NAMES.update(impl.name for impl in self.impls)
        _LIBRARY.define(self.name + torch.library.infer_schema(self.reference, mutates_args=self.mutates))
        for key in ("CPU", "CUDA"):
            _LIBRARY.impl(self.name, self.run, key)
        torch.library.register_fake(f"tilewright::{self.name}", as_given(self.fake or self.reference), lib=_LIBRARY)
        self.dispatched = getattr(torch.ops.tilewright, self.name).default

    def __call__(self, *args: Any) -> Any:
        """Run the op. The first argument is a tensor and decides the device.

        Raises:
            Refused: no implementation takes this problem on this device.
            RuntimeError: an input asks for a gradient.
        """
        if torch.compiler.is_compiling() or dispatch_modes() or not _PLAIN.issuperset(map(type, args)):
            return self.dispatched(*args)
        if transforms():  # the dispatcher has no rule for an op that writes
            return self.reference(*args) if self.mutates else self.dispatched(*args)
        if torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args):
            raise RuntimeError(f"{self.name} is forward only: call it under torch.inference_mode() or torch.no_grad()")
        try:
            return self.run(*args)
        except RuntimeError:
            if not any(isinstance(a, Tensor) and stands_for_many(a) for a in args):
                raise
            return self.dispatched(*args)  # `is_grads_batched=True`: such a tensor is met too seldom to be looked for first

    def run(self, *args: Any) -> Any:
        """Choose and launch, without torch's dispatcher, on the card of the first argument."""
        if autocasts():  # torch's operators in definitions and launchers are to keep the dtypes that they are given
            with torch._C._DisableAutocast():
                return self.run(*args)
        index = args[0].get_device()
        if index < 0 and _CPU_IS_CPU:
            if not args[0].is_meta or _SCOPE.get().card is None:
                return self.reference(*args)  # what `choose` would say, without the summary
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
        """Choose anew at the next call of each problem: what was measured has changed (`tune.lookup.refresh`)."""
        self._choices.clear()
        self.generation += 1

    def chosen_impls(self) -> list[Impl]:
        """The implementations that `run` has chosen since choices were last forgotten, on any device, each once."""
        return list({choice.impl.name: choice.impl for choice in self._choices.values()}.values())

    def chosen(self, *args: Any) -> Choice:
        """What `run` has chosen for such arguments under the scope in force. Raises KeyError where it has not run them."""
        return self._choices[self.problem(*args), args[0].get_device(), _SCOPE.get()]

    def choice_for(self, *args: Any) -> Choice:
        """What a call with these arguments would run."""
        return self.choose(device_of(args[0].get_device()), self.problem(*args))

    def choose(self, device: Device, problem: Any) -> Choice:
        """The implementation and config for a problem, under the scope in force. Raises `Refused` when there is none."""
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
        """Implementation name -> why it does not take the problem, for those that refuse."""
        reasons = {impl.name: impl.refusal(device, problem, scope()) for impl in self.impls}
        return {name: reason for name, reason in reasons.items() if reason is not None}


def launch(impl: Impl, config: Config, args: Args) -> Any:
    """`impl.launch` on the card of the first argument, for a choice that was made before."""
    index = args[0].get_device()
    if not away(index):
        return impl.launch(config, *args)
    with torch.cuda.device(index):
        return impl.launch(config, *args)


_PLAIN = frozenset({
    Tensor, torch.nn.Parameter, type(None), bool, int, float, str, list, tuple, torch.Size, torch.dtype, torch.device,
})  # fmt: skip
"""Arguments that a launcher reads as they are: neither subclasses of tensors, which may have no memory, nor symbols."""
