"""Benchmark of one op against what it replaces: microseconds, share of the roofline, and the ratio, measured alternately."""

import statistics
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.bench.dims import nearest, parse_dims
from tilewright.bench.harness import interleaved_us, sets_for
from tilewright.bench.peers import NoPeer, default_shapes, inductor, peer
from tilewright.bench.provenance import ran_by
from tilewright.bench.sets import SETS, aligned
from tilewright.hw.ceilings import ceilings
from tilewright.hw.device import device_of
from tilewright.hw.roofline import Cost, Roof, roof
from tilewright.op import Inputs, Op, prefer

__all__ = ["checked", "geomean", "measure", "rows", "shapes_of", "unit_of"]

UNITS = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "tf32", torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8",
}  # fmt: skip
UNITS_OF_ALL = frozenset((*UNITS.values(), "int8"))
_LARGEST_BYTES = 32 << 30


def shapes_of(op: Op, dims: Sequence[str], shapes: str | None, named: str | None = None) -> list[list[str]]:
    """The dimensions to measure with: words, "M=1,N=2;M=3,N=4", a set of `bench.sets` with words for each, or the usual ones.

    Raises:
        ValueError: more than one of them is given, the set is unknown, or a word is not one of the op's dimensions.
    """
    if (shapes and dims) or (shapes and named):
        raise ValueError(
            "--shapes cannot be combined with dimensions or --set; dimensions given with --set are added to each of its shapes"
        )
    if named is not None:
        if named not in SETS:
            raise ValueError(f"there is no set {named!r}: {nearest(named, SETS)}")
        texts = [" ".join([text, *dims]) for text in SETS[named]]
    else:
        texts = [" ".join(dims)] if dims else shapes.split(";") if shapes else list(default_shapes(op.name))
    words = [text.replace(",", " ").split() for text in texts if text.strip()]
    for each in words:
        checked(op, each)
    return words


def checked(op: Op, words: Sequence[str]) -> dict[str, Any]:
    """Keywords for `op.make`. Raises ValueError if they are invalid, or if the arguments do not fit on a card."""
    dims = parse_dims(op, words)
    assert op.make is not None, "parse_dims refuses an op without dimensions"
    try:
        args = op.make(Inputs("meta"), **dims)
    except (RuntimeError, TypeError, ZeroDivisionError) as error:
        raise ValueError(f"{op.name} {' '.join(words)}: invalid arguments ({str(error).splitlines()[0]})") from error
    size = sum(a.numel() * a.element_size() for a in args if isinstance(a, Tensor))
    if size > _LARGEST_BYTES:
        raise ValueError(
            f"{op.name} {' '.join(words)}: the arguments need {size >> 30} GiB, wanted at most {_LARGEST_BYTES >> 30}"
        )
    return dims


def measure(
    op: Op, words: Sequence[str], against: str, preferred: str | None = None, beside: Sequence[str] | None = None,
    settle: float = 0.0,
) -> dict[str, Any]:  # fmt: skip
    """One row: the op at these dimensions on the first GPU.

    Args:
        against: "torch" (the call that a user would make in PyTorch), "inductor" (the library's product, then one kernel
            of Inductor), "vendor" (the op's implementation of that name) or "none".
        preferred: measure this implementation instead of the one that is chosen by default.
        beside: other dimensions; the row also gets their time (`beside_us`) and the ratio to it.
        settle: seconds, as in `harness.interleaved_us`.
    """
    dims = checked(op, words)
    assert op.make is not None
    first = op.make(Inputs("cuda", here=True), **dims)
    cost = op.cost(*first)
    sets = min(sets_for(cost.bytes), 16)
    args = [first, *(op.make(Inputs("cuda", seed=i, here=True), **dims) for i in range(1, sets))]

    def run(name: str | None, args: list[tuple[Any, ...]] = args) -> Callable[[int], Any]:
        def call(i: int) -> Any:
            if name is None:
                return op.run(*args[i])
            with prefer(name):
                return op.run(*args[i])

        return call

    calls, opponent = [run(preferred)], None
    if against == "vendor" and any(impl.name == "vendor" for impl in op.impls):
        calls.append(run("vendor"))
        opponent = "vendor"
    elif against != "none":
        try:
            theirs = [(inductor if against == "inductor" else peer)(op.name, a) for a in args]
            calls.append(lambda i: theirs[i]())
            opponent = against
        except NoPeer as error:
            opponent = f"none: {error}"
    if beside is not None:
        others = checked(op, beside)
        calls.append(run(preferred, [op.make(Inputs("cuda", seed=i, here=True), **others) for i in range(sets)]))
    with torch.inference_mode():
        ran = ran_by(lambda: calls[0](0))
        rounds, call_us = 6 if cost.flops > 1e12 else 20, 1e6 * _roof(cost, first).seconds
        times = interleaved_us(calls, sets=sets, rounds=rounds, settle=settle, call_us=call_us)
    row = _row(op, words, first, cost, times, opponent, preferred) | {"kernels": ran}
    if beside is not None:
        row |= {
            "beside": " ".join(beside),
            "beside_us": round(times[-1][0], 2),
            "of_beside": round(times[0][0] / times[-1][0], 3),
        }
    return row


def _roof(cost: Cost, args: tuple[Any, ...]) -> Roof:
    found = ceilings(device_of(0))
    return roof(cost, found, unit_of(args, found.flops))


def _row(
    op: Op, words: Sequence[str], args: tuple[Any, ...], cost: Cost, times: list[tuple[float, float]], opponent: str | None,
    preferred: str | None,
) -> dict[str, Any]:  # fmt: skip
    with prefer(preferred) if preferred else torch.inference_mode():
        choice = op.choice_for(*args)
    us, spread = times[0]
    best = _roof(cost, args)
    row: dict[str, Any] = {
        "op": op.name,
        "dims": " ".join(words),
        "impl": choice.impl.name,
        "config": dict(choice.config),
        "source": choice.source,
        "us": round(us, 2),
        "spread_us": round(spread, 2),
        "tflop_per_s": round(cost.flops / us / 1e6, 1),
        "tb_per_s": round(cost.bytes / us / 1e6, 3),
        "of_roof": round(best.seconds * 1e6 / us, 3),
        "bound": best.bound,
        "against": opponent or "none",
    }
    if opponent in ("vendor", "torch", "inductor"):
        row |= {"their_us": round(times[1][0], 2), "ratio": round(times[1][0] / us, 3)}
    return row


def _figures(row: dict[str, Any]) -> str:
    theirs = f"; {row['against']} {row['their_us']} us, ratio {row['ratio']}" if "ratio" in row else ""
    return f"{row['impl']} {row['us']} us, {row['tflop_per_s']} TFLOP/s, {row['tb_per_s']} TB/s{theirs}"


def unit_of(args: Sequence[Any], units: Container[str] = UNITS_OF_ALL) -> str:
    """The arithmetic unit whose peak applies to these arguments.

    It is the unit of the first floating-point tensor, or int8's if the first two tensors are int8 (operands of a product, whose
    scales follow). It is bf16's if the card has no such unit, or if nothing is multiplied.
    """
    dtypes = [a.dtype for a in args if isinstance(a, Tensor)]
    products = dtypes[:2] == [torch.int8, torch.int8]
    unit = "int8" if products else UNITS[next((dtype for dtype in dtypes if dtype in UNITS), torch.bfloat16)]
    return unit if unit in units else "bf16"


def geomean(rows: Sequence[dict[str, Any]]) -> float | None:
    """Geometric mean of the ratios; above 1, ours is faster. None if there are no ratios."""
    ratios = [row["ratio"] for row in rows if "ratio" in row]
    return round(statistics.geometric_mean(ratios), 3) if ratios else None


def rows(
    op: Op,
    shapes: Sequence[Sequence[str]],
    against: str,
    preferred: str | None,
    say: Callable[[str], None],
    beside_aligned: bool = False,
    settle: float = 0.0,
) -> Iterator[dict[str, Any]]:
    """A row for each set of dimensions. `beside_aligned`: also time the next larger product with rows aligned to 16 bytes."""
    for words in shapes:
        say(f"{op.name} {' '.join(words)}")
        beside = aligned(words) if beside_aligned else words
        row = measure(op, words, against, preferred, None if beside == list(words) else beside, settle)
        say("  " + _figures(row))
        yield row
        torch.cuda.empty_cache()
