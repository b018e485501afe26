"""Random programs of torch calls through `optimize` and the torch.compile backend, each against itself in float64.

    python -m tests.fuse.random_graphs --count 5000 --seed 0 --backend both

Program i has seed `--seed` + i, so a run that was stopped goes on with a later seed. Each is called on the example's inputs, on
other values, and every fifth on other sizes. A failure prints its seed and the smallest program that still fails, as Python.
Exit code 1 where anything failed.

Verdicts: right; wrong (an output, or a bug of a fusion that was found and mended at run time); raised; given (the original
model answers in our graph's place); unsaid (a product, convolution, attention, norm or pool runs as torch's own kernel and the
report has no reason for it: counted by operator); theirs (Inductor fails without our pass too); unfit (eager float32 itself is
too far off, or would be with one rounding more).
"""

import argparse
import json
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._inductor.compile_fx import compile_fx, view_to_reshape
from torch.utils._python_dispatch import TorchDispatchMode

import tilewright
from tests.fuse import random_attention as shared
from tests.fuse import random_ops as ops
from tests.fuse.random_draw import Draw
from tests.fuse.random_program import Input, Program, copied, double, error
from tilewright.fuse.post_grad import fuse_graph

RMS, LARGEST = 1e-5, 1e-3
"""Error allowed in float32, over the RMS of the right output; programs on which eager has a tenth of it are not judged."""
NOISE = 0.1
"""Programs whose right output rounding alone moves by more, as that of `x - x`, are not judged."""
BUG = "bug in tilewright's fusion"
"""The text with which a report names a fusion that is wrong."""
OPS: dict[Callable[[Draw], None], float] = {
    ops.linear: 5, ops.conv: 4, ops.conv_transposed: 1, ops.again: 2, ops.tied: 1, ops.views: 6, ops.joined: 2, ops.binary: 5,
    ops.residual: 3, ops.activation: 5, ops.norm: 5, ops.pool: 2, ops.squeeze_excite: 0.7, ops.growing: 0.7,
    ops.reduce: 1.5, shared.attention: 4, shared.differential: 0.7, shared.rope: 0.7, shared.gated: 2, shared.block: 0.3,
}  # fmt: skip
SPOKEN = frozenset({
    "convolution", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "linear", "mm", "addmm", "bmm",
    "matmul", "baddbmm", "einsum", "scaled_dot_product_attention", "layer_norm", "rms_norm", "group_norm", "batch_norm",
    "instance_norm", "max_pool1d", "max_pool2d", "avg_pool1d", "avg_pool2d", "adaptive_avg_pool1d", "adaptive_avg_pool2d",
    "lstm", "gru",
})  # fmt: skip
"""What may not be left to torch without a word."""


def draw(seed: int) -> Program:
    """A legal program, the same for the same seed."""
    d = Draw(seed)
    batch, length = (2, d.one(1, 3, 3, 5)), (d.one(3, 4, 5), d.one(4, 5, 7))
    if d.chance(0.5):
        length = (length[0], length[0])
    kinds: dict[str, tuple[tuple[int, int], ...]] = {
        "image": (batch, (d.one(3, 4, 8),) * 2, (d.one(5, 6, 8),) * 2, (d.one(4, 6, 7),) * 2),
        "sequence": (batch, length, (d.one(6, 8, 16),) * 2),
        "signal": (batch, (d.one(2, 4, 8),) * 2, length),
        "rows": (batch, (d.one(5, 8, 16),) * 2),
        "ids": (batch, length),
        "volume": (batch, (2, 2), (4, 4), (4, 4), (3, 3)),
    }
    for kind in d.rng.choices(list(kinds), [4, 6, 1, 2, 1.5, 0.3], k=d.one(1, 1, 2, 3)):
        first, second = (tuple(size[at] for size in kinds[kind]) for at in (0, 1))
        layouts = ["contiguous"] * 4 + ["transposed", "offset"] + ["channels_last"] * (kind == "image")
        d.input(first, second, "ids" if kind == "ids" else "float", d.one(*layouts))
    if any(i.kind == "ids" for i in d.program.inputs):
        d.attempt(ops.tied)
    wanted, tries = d.rng.randint(4, 16), 0
    while len(d.program.steps) < wanted and tries < 60:
        tries += 1
        d.attempt(d.rng.choices(list(OPS), list(OPS.values()))[0])
    return d.returning() if d.program.steps else draw(seed + 1_000_000_007)


# ---- judging


RAISED = (RuntimeError, ValueError, TypeError, AssertionError, ArithmeticError, AttributeError, LookupError, ImportError)
"""What a call may die of, and the run goes on."""
BAD = ("wrong", "raised", "unsaid", "given")


@dataclass(frozen=True)
class Verdict:
    """What became of a program."""

    kind: str
    """One of the words above."""
    words: str = ""

    @property
    def failed(self) -> bool:
        """Whether somebody has to look at it."""
        return self.kind in BAD


@dataclass(frozen=True)
class Call:
    """One call that is compared."""

    name: str
    given: tuple[Tensor, ...]
    want: Any


class Jitter(TorchDispatchMode):
    """While on, each number of a new float32 tensor is off by an ulp, up or down at random."""

    def __init__(self) -> None:
        super().__init__()
        self.random = torch.Generator().manual_seed(0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        new = isinstance(out, Tensor) and out.dtype == torch.float32 and all(r.alias_info is None for r in func._schema.returns)
        if not new:
            return out
        ways = torch.tensor([-torch.inf, torch.inf])[torch.randint(2, out.shape, generator=self.random)]
        return torch.nextafter(out, ways)


def calls(program: Program, seed: int, module: torch.nn.Module) -> Iterator[Call | str]:
    """The example's sizes, other numbers in them, other sizes; a sentence where eager float32 is no measure."""
    exact = double(module.state_dict())
    wide = program.module(seed).double()
    wide.load_state_dict(exact)
    for name, which, at in (("the example", 0, 1), ("other values", 0, 2), ("other sizes", 1, 3)):
        given = program.arguments(which, seed + at)
        with torch.no_grad():
            want = wide(*double(given))
            off = error(module(*copied(given)), want)
            with Jitter():
                noise = error(module(*copied(given)), want)
        if not (off.rms <= RMS / 10 and off.largest <= LARGEST / 10):
            yield f"eager float32 is off by {off.rms:.1e}"
            return
        if not noise.rms <= NOISE:
            yield f"one more rounding in each of its values moves eager float32 by {noise.rms:.1e}"
            return
        yield Call(name, given, want)


def own_graph(module: torch.nn.Module, given: tuple[Tensor, ...]) -> tuple[Callable[..., Any], str]:
    """(the optimised model, what its report leaves unsaid)."""
    fast = tilewright.optimize(module, copied(given), "fp32", compiled=False, report=False)
    report = getattr(fast, "report", None)
    if report is None:
        return fast, ""
    if BUG in report.text():
        return fast, next(line for line in report.text().splitlines() if BUG in line)
    refused = {d.node for d in report.decisions if not d.taken} | {d.anchor for d in report.decisions if not d.taken}
    left = [row for row in report.launches if row["op"].startswith("aten.") and row["op"].split(".")[1] in SPOKEN]
    unsaid = sorted({row["op"] for row in left if row["layer"] not in refused and row.get("node") not in refused})
    return fast, ", ".join(unsaid)


def inductor_pass(
    module: torch.nn.Module, given: tuple[Tensor, ...], ours: bool = True
) -> tuple[Callable[..., Any], str]:  # fmt: skip
    """The torch.compile backend as far as our pass, or without it, then node by node: Inductor's own code takes seconds."""

    def inner(graph: torch.fx.GraphModule, inputs: Any, **more: Any) -> Any:
        view_to_reshape(graph)
        if ours:
            fuse_graph(graph.graph, cpu=True)
        graph.recompile()
        return make_boxed_func(graph.forward)

    torch.compiler.reset()
    return torch.compile(module, backend=lambda graph, inputs: compile_fx(graph, inputs, inner_compile=inner)), ""


def inductor(module: torch.nn.Module, given: tuple[Tensor, ...]) -> tuple[Callable[..., Any], str]:
    """The torch.compile backend as users have it."""
    torch.compiler.reset()
    return torch.compile(module, backend="tilewright", options={"tilewright.cpu": True}), ""


BACKENDS: dict[str, Callable[..., tuple[Callable[..., Any], str]]] = {
    "own": own_graph,
    "pass": inductor_pass,
    "inductor": inductor,
}


def judge(program: Program, seed: int, backend: str, sizes: bool = True) -> Verdict:
    """One program through one back end; `sizes`: with the other sizes too, which may take another graph."""
    module = program.module(seed)
    compared: list[Call] = []
    for one in calls(program, seed, module):
        if not sizes and isinstance(one, Call) and one.name == "other sizes":
            continue
        if isinstance(one, str):
            return Verdict("unfit", one)
        compared.append(one)
    verdict = compare(BACKENDS[backend], module, compared)
    if verdict.failed and backend != "own" and compare(partial(inductor_pass, ours=False), module, compared).failed:
        return Verdict("theirs", verdict.words)
    return verdict


def compare(make: Callable[..., tuple[Callable[..., Any], str]], module: torch.nn.Module, compared: list[Call]) -> Verdict:
    """What a back end makes of a module, call by call."""
    where, unsaid = "optimize", ""
    try:
        with torch.no_grad():
            fast, unsaid = make(module, compared[0].given)
            for one in compared:
                where = one.name
                off = error(fast(*copied(one.given)), one.want)
                if not (off.rms <= RMS and off.largest <= LARGEST):
                    return Verdict("wrong", f"{where}: RMS error {off.rms:.1e}, largest {off.largest:.1e}; {off.words}")
    except RAISED as e:
        if where == "other sizes" and isinstance(e, ValueError) and "it was optimised for" in str(e):
            return Verdict("unsaid", unsaid) if unsaid else Verdict("right", "other sizes are refused")
        frame = traceback.extract_tb(e.__traceback__)[-1]
        kind = "wrong" if type(e).__name__ == "Inaccurate" else "raised"
        said = " ".join(str(e).split())[:300]
        return Verdict(kind, f"{where}: {type(e).__name__} at {Path(frame.filename).name}:{frame.lineno}: {said}")
    if BUG in unsaid:
        return Verdict("wrong", unsaid)
    for shape in getattr(getattr(fast, "report", None), "shapes", ()):
        if not shape.optimised:
            return Verdict("given", f"{shape.inputs}: {shape.reason}")
    return Verdict("unsaid", unsaid) if unsaid else Verdict("right")


# ---- making smaller


def smaller(program: Program, seed: int) -> Iterator[Program]:
    """Programs with something taken out, the largest cuts first."""
    names = [name for name, _ in program.steps]
    yield from (replace(program, returned=name).without_dead() for name in names if name != program.returned)
    values = _values(program, seed)
    if values is None:
        return
    shapes = {n: tuple(tuple(own[n].shape) for own in values) for n in values[0] if isinstance(values[0][n], Tensor)}
    for at in reversed(range(len(program.steps))):
        name, _ = program.steps[at]
        if name not in shapes:
            continue
        rest = (*program.steps[:at], *program.steps[at + 1 :])
        if values[0][name].is_floating_point():
            # As an input: all that came before it may go.
            given = Input(f"a{max(int(i.name[1:]) for i in program.inputs) + 1}", shapes[name])  # pyright: ignore[reportArgumentType]
            cut = _renamed(replace(program, steps=rest, inputs=(*program.inputs, given)), name, given.name)
            if cut.returned != given.name:
                yield cut.without_dead()
        earlier = [n for n in (*(i.name for i in program.inputs), *names[:at]) if shapes.get(n) == shapes[name]]
        for other in earlier[-2:]:
            yield _renamed(replace(program, steps=rest), name, other).without_dead()
    for i, given in enumerate(program.inputs):
        if given.layout != "contiguous":
            yield replace(program, inputs=(*program.inputs[:i], replace(given, layout="contiguous"), *program.inputs[i + 1 :]))


def _renamed(program: Program, old: str, new: str) -> Program:
    import re

    def put(text: str) -> str:
        return re.sub(rf"\b{old}\b", new, text)

    return replace(program, steps=tuple((name, put(text)) for name, text in program.steps), returned=put(program.returned))


def _values(program: Program, seed: int) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Every value of a program for both sizes; None where it does not run."""
    from tests.fuse.random_draw import values_of

    try:
        return values_of(program, seed)
    except (RuntimeError, ValueError, IndexError, TypeError):
        return None


def minimise(program: Program, seed: int, fails: Callable[[Program], bool], limit: int = 150) -> Program:
    """The smallest program found that still fails, by at most `limit` trials."""
    tried, seen = 0, {program.source()}
    again = True
    while again and tried < limit:
        again = False
        for one in smaller(program, seed):
            if tried >= limit or one.source() in seen:
                continue
            seen.add(one.source())
            tried += 1
            if fails(one):
                program, again = one, True
                break
    return program


def fails_as(kind: str, seed: int, backend: str) -> Callable[[Program], bool]:
    """Whether a program fails in that way; one that does not even run in eager does not."""

    def fails(program: Program) -> bool:
        try:
            return judge(program, seed, backend).kind == kind
        except (RuntimeError, ValueError, IndexError, TypeError, SyntaxError, NotImplementedError):
            return False

    return fails


# ---- the command


def main(given: list[str] | None = None) -> int:
    """Judge `--count` programs. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuse.random_graphs", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first program; the next has the next one")
    parser.add_argument("--backend", choices=["own", "pass", "inductor", "both"], default="own", help="both: own and pass")
    parser.add_argument(
        "--sizes-every", type=int, default=5, help="other sizes, which take another graph, in one program of so many"
    )
    parser.add_argument("--log", type=Path, help="append a line of JSON for each failure")
    parser.add_argument("--show", action="store_true", help="print every program")
    parser.add_argument("--no-minimise", action="store_true", help="print failing programs as they were drawn")
    options = parser.parse_args(given)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    backends = ["own", "pass"] if options.backend == "both" else [options.backend]
    counts, unsaid = Counter[str](), Counter[str]()
    start = time.perf_counter()
    for at in range(options.count):
        seed = options.seed + at
        program = draw(seed)
        if options.show:
            print(f"# seed {seed}\n{program.source()}", flush=True)
        for backend in backends:
            verdict = judge(program, seed, backend, sizes=seed % options.sizes_every == 0)
            counts[f"{backend} {verdict.kind}"] += 1
            if verdict.kind == "unsaid":
                unsaid.update(verdict.words.split(", "))
            elif verdict.failed:
                _say(program, seed, backend, verdict, options)
        if (at + 1) % 50 == 0:
            print(
                f"{at + 1} of {options.count}, {time.perf_counter() - start:.0f} s: {_summary(counts)}; next seed {seed + 1}",
                flush=True,
            )
    if unsaid:
        print("left to torch without a reason: " + ", ".join(f"{n} x {name}" for name, n in unsaid.most_common()))
    print(f"{options.count} programs from seed {options.seed} in {time.perf_counter() - start:.0f} s: {_summary(counts)}")
    return int(any(kind.split()[1] in BAD for kind in counts))


def _summary(counts: Counter[str]) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items()))


def _say(program: Program, seed: int, backend: str, verdict: Verdict, options: argparse.Namespace) -> None:
    small = program if options.no_minimise else minimise(program, seed, fails_as(verdict.kind, seed, backend))
    final = judge(small, seed, backend)
    print(f"\n# {final.kind} (seed {seed}, {backend}): {final.words}\n{small.snippet(seed)}\n", flush=True)
    if options.log is not None:
        row = {"seed": seed, "backend": backend, "kind": final.kind, "words": final.words, "source": small.snippet(seed)}
        with options.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    sys.exit(main())
