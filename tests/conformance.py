"""What every implementation of every op must show, for each example.

The oracle is the reference in float64 on the inputs as they are after rounding. The RMS error is relative to the RMS of
the oracle, the largest error to that RMS plus the element's own size (a 10 cannot be held as finely as a 1). Outputs are
poisoned before the run, so an element that a kernel forgets is a NaN, not yesterday's right answer.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tilewright.hw.device import device_of
from tilewright.op import Config, Impl, Op
from tilewright.tune.tolerance import Poisoned, bits, codes_apart, errors, flat, written

# The limits stand here on purpose, beside those of the package: nobody loosens both by accident.
# (largest error, RMS error) of one rounding; half an ulp of bf16 is 2^-9 to 2^-8 of the value. An op that rounds its way
# more than once (`Op.roundings`) has as many times the room; it may tighten its own limits, never loosen them.
LIMITS = {
    torch.float32: (1e-5, 1e-6),
    torch.float16: (1e-3, 5e-4),
    torch.bfloat16: (8e-3, 4e-3),
    torch.float64: (1e-12, 1e-13),
    # Codes and their scales have one right value.
    torch.float8_e4m3fn: (0.0, 0.0),
    torch.float8_e5m2: (0.0, 0.0),
    torch.float8_e8m0fnu: (0.0, 0.0),
}


def fresh(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A copy of the arguments with their strides kept; views of one buffer become separate buffers."""

    def copy(a: Any) -> Any:
        if not isinstance(a, Tensor):
            return a
        held = a.detach().clone(memory_format=torch.preserve_format)
        if held.stride() != a.stride():
            storage = torch.zeros(1 + sum((n - 1) * s for n, s in zip(a.shape, a.stride())) if a.numel() else 0)
            held = storage.to(a.dtype).to(a.device).as_strided(a.shape, a.stride()).copy_(a)
        return held

    return tuple(copy(a) for a in args)


def mutated(op: Op, args: tuple[Any, ...]) -> list[Tensor]:
    """The arguments that the op declares to write."""
    return [args[place] for place in written(op) if args[place] is not None]


def outputs(op: Op, impl: Impl | None, config: Config, args: tuple[Any, ...]) -> list[Tensor]:
    """All that a run produces: what it returns, then what it wrote in place. `impl` None is the reference."""
    given = fresh(args)
    if impl is None:
        return flat(op.reference(*given)) + mutated(op, given)
    result = flat(impl.launch(config, *given))
    only_what_is_declared(op, args, given, result)
    return result + mutated(op, given)


def only_what_is_declared(op: Op, before: tuple[Any, ...], after: tuple[Any, ...], results: list[Tensor]) -> None:
    """Raise AssertionError if a run wrote an argument that the op does not declare to write, or returned memory of one."""
    for place, (was, now) in enumerate(zip(before, after, strict=True)):
        if not isinstance(now, Tensor) or not now.numel():
            continue
        assert place in written(op) or torch.equal(bits(now), bits(was)), f"argument {place} is written, and not declared so"
        memory = now.untyped_storage().data_ptr()
        held = [i for i, result in enumerate(results) if result.numel() and result.untyped_storage().data_ptr() == memory]
        assert not held, f"output {held[0]} is the memory of argument {place}"


def oracle(op: Op, args: tuple[Any, ...]) -> list[Tensor]:
    """The reference in float64."""
    wide = tuple(a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in fresh(args))
    return flat(op.reference(*wide)) + mutated(op, wide)


INTERPRETED = device_of(-1).kind == "interpret"

# (steps, share) that codes of computed numbers may be from the definition's.
MOVED_CODES = (1, 0.02)


def check(op: Op, impl: Impl, config: Config, args: tuple[Any, ...]) -> None:
    """Raise AssertionError unless this implementation with this config matches the definition, on a GPU twice, bitwise."""
    want = outputs(op, None, {}, args) if op.codes_may_move else oracle(op, args)
    with Poisoned():
        got = outputs(op, impl, config, args)
        # The interpreter runs one program after another: there are no two orders to tell apart.
        again = got if INTERPRETED else outputs(op, impl, config, args)
    assert len(got) == len(want)
    for i, (g, a, w) in enumerate(zip(got, again, want, strict=True)):
        assert g.shape == w.shape, f"output {i}: shape {tuple(g.shape)}, the definition has {tuple(w.shape)}"
        assert torch.equal(bits(g), bits(a)), f"output {i}: two runs differ"
        if op.codes_may_move and g.element_size() == 1:
            steps, share = codes_apart(g, w)
            assert steps <= MOVED_CODES[0], f"output {i}: codes up to {steps} steps away"
            assert share <= MOVED_CODES[1], f"output {i}: {share:.1%} of the codes differ"
            continue
        if not g.is_floating_point():
            assert torch.equal(g, w), f"output {i}: {int((g != w).sum())} of {w.numel()} integers differ"
            continue
        limit_max, limit_rms = limits(op, impl, torch.bfloat16 if op.codes_may_move else g.dtype)
        err_max, err_rms = errors(g, w)
        if op.codes_inside and w.numel() and err_max < math.inf:
            # A code that moved by one, an eighth of its number, shows whole where few numbers make up a result.
            most, largest = float((g.double() - w.double()).abs().max()), float(w.abs().max())
            assert most <= largest / 8, f"output {i}: largest error {most:.3g}, the largest element is {largest:.3g}"
            err_max = 0.0
        assert err_max <= limit_max, f"output {i}: largest error {err_max:.3g} of the RMS, limit {limit_max:.3g}"
        assert err_rms <= limit_rms, f"output {i}: RMS error {err_rms:.3g} of the RMS, limit {limit_rms:.3g}"


def limits(op: Op, impl: Impl, dtype: torch.dtype) -> tuple[float, float]:
    """The limits in force for an op: the table's, or the op's own where they are tighter."""
    roundings = op.roundings + impl.extra_roundings
    table = (roundings * LIMITS[dtype][0], roundings * LIMITS[dtype][1])
    own = op.tolerance.get(dtype, table)
    assert own[0] <= table[0], f"{op.name} loosens a limit"
    assert own[1] <= table[1], f"{op.name} loosens a limit"
    return own


@contextmanager
def quiet_compile() -> Iterator[None]:
    """torch.compile with a fresh cache of traces."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()
