"""One row of the table of models: an optimised model checked, counted and timed beside torch."""

import copy
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

import tilewright
from tests.fuse.random_graphs import RAISED
from tests.fuse.random_program import Error, double, error
from tests.fuse.zoo_models import MODELS

LIMITS = {"fp32": 1e-4, "fp16": 1e-2}
"""RMS error allowed, over the RMS of the right output."""
CALLS = 4
"""With inputs that `optimize` has not seen, whose outputs are compared."""
REFUSALS = 6
"""How many reasons a row keeps, the most frequent first."""
Inputs = tuple[tuple[Tensor, ...], dict[str, Tensor]]


@contextmanager
def exact() -> Iterator[None]:
    """float32 products without TF32."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def built(name: str, small: bool = False) -> nn.Module:
    """A model with its own random weights, in evaluation, on the CPU."""
    torch.manual_seed(0)
    return MODELS[name].make(small).eval().requires_grad_(False)


def inputs(name: str, batch: int, small: bool = False, seed: int = 1) -> Inputs:
    """(args, kwargs) on the CPU, float32."""
    torch.manual_seed(seed)
    given = MODELS[name].inputs(batch, small)
    return ((), given) if isinstance(given, dict) else (given, {})


def right(model: nn.Module, given: Inputs) -> Any:
    """What the model gives as its user calls it: in float64 on a CPU, in float32 without TF32 on a GPU."""
    args, kwargs = given
    with torch.no_grad(), exact():
        if next(model.parameters()).is_cuda:
            return model(*args, **kwargs)
        return copy.deepcopy(model).double()(*double(args), **double(kwargs))


def optimized(model: nn.Module, given: Inputs, **how: Any) -> Any:
    """`optimize` as a user calls it, without the printed report."""
    args, kwargs = given
    precision = "fp16" if next(model.parameters()).is_cuda else "fp32"
    return tilewright.optimize(model, args, precision, example_kwargs=kwargs, report=False, **how)


def flops(call: Callable[[], Any]) -> int:
    """Of products, convolutions and attention that torch's own kernels do in a call.

    Without the libraries' own LSTM and torch's fused encoder layers, which the counter does not know: the products that they
    stand for are counted.
    """
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    rnn = torch.backends.mkldnn.flags(enabled=False), torch.backends.cudnn.flags(enabled=False)
    try:
        with torch.no_grad(), rnn[0], rnn[1], FlopCounterMode(display=False) as counter:
            call()
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
    return counter.get_total_flops()


def one_by_one(model: nn.Module, given: Inputs) -> Any:
    """An optimised model without a CUDA graph, Inductor or measuring: every call can be seen."""
    how = {"graph": False, "search": None, "measure": False} if next(model.parameters()).is_cuda else {"compiled": False}
    return optimized(model, given, **how)


def taken(plain: Any, model: nn.Module, given: Inputs) -> dict[str, Any]:
    """Shares of FLOPs and launches, refusals by reason.

    Args:
        plain: of `one_by_one`.
        model: as given.
        given: the examples.
    """
    args, kwargs = given
    report = plain.report
    every, left = flops(lambda: model(*args, **kwargs)), flops(lambda: plain(*args, **kwargs))
    foreign = [row["op"] for row in report.launches if row["op"].startswith("aten.")]
    reasons = Counter(d.reason for d in report.decisions if not d.taken)
    return {
        "flops": every,
        "flops_ours": round(1 - left / every, 4) if every else None,
        "launches": len(report.launches),
        "launches_ours": len(report.launches) - len(foreign),
        "left": dict(Counter(foreign).most_common(REFUSALS)),
        "refused": dict(reasons.most_common(REFUSALS)),
        "taken": dict(sorted(Counter(d.kind for d in report.decisions if d.taken).items())),
    }


# ---- one row


def verdict(off: Error, limit: float) -> str:
    """In words."""
    if off.rms <= limit:
        return "right"
    return f"wrong: RMS error {off.rms:.1e}, wanted {limit:.0e}" + (f" ({off.words})" if off.words else "")


def _kept(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _together(outputs: list[Any]) -> Any:
    """Of several calls, each leaf's values in one tensor."""
    return pytree.tree_map(lambda *leaves: torch.stack(leaves) if isinstance(leaves[0], Tensor) else leaves, *outputs)


def checked(name: str, batch: int, fast: Any, model: nn.Module, small: bool = False) -> dict[str, Any]:
    """The verdict on an optimised model, on inputs that it has not seen: right, error, and what runs them.

    The error is that of `CALLS` calls together: some models give one number a call, which may happen to be near zero.
    """
    device = next(model.parameters()).device
    got, want = [], []
    try:
        for seed in range(2, 2 + CALLS):
            given = pytree.tree_map(lambda t: t.to(device), inputs(name, batch, small, seed))
            want.append(right(model, given))
            got.append(pytree.tree_map(_kept, fast(*given[0], **given[1])))
        off = error(_together(got), _together(want))
    except RAISED as e:
        return {"right": f"raised: {_words(e)}"}
    given_back = [shape for shape in fast.report.shapes if not shape.optimised] if hasattr(fast, "report") else []
    runs = f"as given: {given_back[0].reason}" if given_back else "optimised"
    return {"right": verdict(off, LIMITS["fp16" if device.type == "cuda" else "fp32"]), "error": off.rms, "runs": runs}


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


class Prepared:
    """A row whose model is optimised and whose baselines are compiled; `measure` times them.

    `over`: when torch.compile is given up, by `time.time`. `search`: it searches among its own kernels (max-autotune).
    """

    def __init__(self, name: str, batch: int, device: str, compiled: bool, over: float | None = None, search: bool = True):
        self.row: dict[str, Any] = {"model": name, "batch": batch, "device": device, "torch": torch.__version__}
        self.calls: dict[str, Callable[[], Any]] = {}
        model = built(name).to(device)
        given = pytree.tree_map(lambda t: t.to(device), inputs(name, batch))
        start = time.perf_counter()
        try:
            fast = optimized(model, given) if device == "cuda" or compiled else one_by_one(model, given)
            self.row["optimise_s"] = round(time.perf_counter() - start, 1)
            plain = one_by_one(model, given) if device == "cuda" or compiled else fast
        except RAISED as e:
            self.row["right"] = f"raised: {_words(e)}"
            return
        told = fast.report.facts if hasattr(fast, "report") else {}
        self.row |= {name: told[name] for name in ("speed", "rivals", "no rival") if name in told}
        self.row |= taken(plain, model, given)
        self.row |= checked(name, batch, fast, model)
        other = checked(name, batch + 1, plain, model)
        self.row["other_batch"] = other["right"] if other.get("runs", "optimised") == "optimised" else other["runs"]
        self.row["parts"] = type(fast).__name__ == "Partial"
        self.calls["ours"] = lambda: fast(*given[0], **given[1])
        self.calls |= (
            baselines(name, model, given, over, search) if device == "cuda" else {"eager": lambda: model(*given[0], **given[1])}
        )
        if not search and "compile" in self.calls:
            self.row["note"] = "torch.compile without max-autotune, whose search did not end in the time."

    def measure(self) -> dict[str, Any]:
        """The row, with medians in microseconds."""
        if self.calls:
            self.row["us"] = {name: round(us, 1) for name, us in times(self.calls, self.row["device"] == "cuda").items()}
        return self.row


# ---- time


@contextmanager
def _measured_algorithms() -> Iterator[None]:
    """cuDNN times its algorithms and takes the fastest."""
    before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


class _OverError(Exception):
    """The time is over."""


@contextmanager
def _until(over: float | None) -> Iterator[None]:
    """Raise `_OverError` inside when the time is over."""

    def stop(*_: object) -> None:
        raise _OverError("the time is over")

    if over is None:
        yield
        return
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(0.1, over - time.time()))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def baselines(
    name: str, model: nn.Module, given: Inputs, over: float | None = None, search: bool = True
) -> dict[str, Callable[[], Any]]:
    """torch in fp16 on a GPU: eager, a CUDA graph of it, torch.compile. cuDNN measures its algorithms for the latter two.

    What fails, or is not there in time, is left out, and printed.
    """
    half = copy.deepcopy(model).half()
    args, kwargs = pytree.tree_map(lambda t: t.half() if t.is_floating_point() else t, given)
    if MODELS[name].images:
        half = half.to(memory_format=torch.channels_last)
        args = tuple(t.to(memory_format=torch.channels_last) for t in args)

    def eager() -> Any:
        return half(*args, **kwargs)

    found: dict[str, Callable[[], Any]] = {"eager": eager}
    for what, make in (("graph", lambda: _captured(eager)), ("compile", lambda: _compiled(half, args, kwargs, search))):
        try:
            with _until(over if what == "compile" else None), _measured_algorithms():
                found[what] = make()
        except (*RAISED, _OverError) as e:
            print(f"{name}: no {what}: {_words(e)}", file=sys.stderr, flush=True)
    return found


def _captured(call: Callable[[], Any]) -> Callable[[], Any]:
    with torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = call()

    def replay() -> Any:
        graph.replay()
        return kept

    return replay


def _compiled(model: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], search: bool = True) -> Callable[[], Any]:
    """torch.compile with frozen weights, which captures a CUDA graph of its own: max-autotune, or without a search."""
    from torch._inductor import config

    torch.compiler.reset()
    called = torch.compile(model, mode="max-autotune" if search else "reduce-overhead", dynamic=False)
    with config.patch(freezing=True), torch.no_grad():
        for _ in range(4):  # compiles, records, replays
            called(*args, **kwargs)
    return lambda: called(*args, **kwargs)


def times(calls: dict[str, Callable[[], Any]], gpu: bool, seconds: float = 1.0) -> dict[str, float]:
    """Median microseconds of each call, in turns of about 20 ms, `seconds` for each of them."""

    def turn(call: Callable[[], Any], count: int) -> float:
        if gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        if gpu:
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / count

    with torch.no_grad():
        for call in calls.values():
            turn(call, 2)
        counts = {name: max(1, int(0.02 / turn(call, 1))) for name, call in calls.items()}
        found: dict[str, list[float]] = {name: [] for name in calls}
        start = time.perf_counter()
        while len(next(iter(found.values()))) < 5 or time.perf_counter() - start < seconds * len(calls):
            for name, call in calls.items():
                found[name].append(turn(call, counts[name]))
    return {name: 1e6 * statistics.median(values) for name, values in found.items()}
