"""Explains a call: which implementation and config it uses and why, what limits it, what alternatives there are.

`explain` works for any card, present or not: the choice is the one that a program would make there, facts come from compiling
the kernels for that card, the lower bound from its ceilings, the predicted time from the analytical model. A library's kernel
is opaque; for a product its waves are estimated for usual tiles (`library_waves`). Nothing is run. A time is called measured
only if there is a record.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tilewright.asm.certificate import ConfigFacts, config_facts, config_key
from tilewright.asm.compile import Binary, CompileFailed, record
from tilewright.asm.facts import facts
from tilewright.bench.library_waves import TILES, Product, alignment_cliffs, tile_waves, wave_cliffs
from tilewright.bench.op import unit_of
from tilewright.hw.ceilings import ceilings
from tilewright.hw.device import Device
from tilewright.hw.occupancy import occupancy
from tilewright.hw.roofline import roof
from tilewright.hw.waves import waves
from tilewright.op import Choice, Impl, Inputs, Op, Refused, on_card, scope
from tilewright.tune.lookup import measured
from tilewright.tune.model import predict

__all__ = ["explain"]

_SOURCES = {
    "exact": "a measured record of this very problem",
    "bucket": "a measured record of a nearby problem",
    "default": "the built-in rule; nothing near was measured",
    "fixed": "there is nothing to choose",
}


def explain(op: Op, dims: Mapping[str, Any], device: Device) -> dict[str, Any]:
    """An explanation of a call, made without running it, as plain JSON values. `prefer` and `invariant` scopes apply.

    Raises:
        Refused: no implementation accepts the problem on the card; the message has the reason of each.
    """
    assert op.make is not None
    args = op.make(Inputs("meta"), **dims)
    problem = op.problem(*args)
    choice = op.choose(device, problem)
    cost = _cost(op, dims, args)
    found = ceilings(device)
    floor = roof(cost, found, unit_of(args, found.flops))
    kernels, failed = _kernels(choice, args, device)
    entry = choice.entry if choice.source == "exact" else None  # a neighbour's time is not this problem's
    time_us = None if entry is None else entry.us
    answer: dict[str, Any] = {
        "op": op.name,
        "dims": {name: _plain(value) for name, value in dims.items()},
        "problem": {name: _plain(value) for name, value in problem._asdict().items()},
        "card": {"name": device.name, "arch": device.arch, "sms": device.sms},
        "impl": choice.impl.name,
        "config": dict(choice.config),
        "source": choice.source,
        "source_in_words": _SOURCES[choice.source],
        "others": {
            impl.name: _why_not(impl, op, choice, device, problem, args) for impl in op.impls if impl.name != choice.impl.name
        },
        "roofline": {
            "flops": cost.flops,
            "bytes": cost.bytes,
            "floor_us": floor.seconds * 1e6,
            "bound": floor.bound,
            "ceilings": floor.source,
        },
        "measured_us": time_us,
        "of_roof": None if time_us is None else floor.seconds * 1e6 / time_us,
        "predicted": _predicted(choice.impl, choice.config, args, device, kernels),
        "kernels": kernels,
        "compile_error": failed,
        "library_tiles": [],
        "cliffs": list(_cliffs(op, dims, choice, device)),
    }
    product = _library_product(op, choice, args)
    if product is not None:
        answer["library_tiles"] = [_tiles(product, tile, device) for tile in TILES]
        answer["cliffs"] += [f"{line} (estimate)" for line in wave_cliffs(product, device.sms)]
        answer["cliffs"] += list(alignment_cliffs(product))
    answer["advice"] = list(_advice(op, answer))
    return answer


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str | None) else str(value).removeprefix("torch.")


def _cost(op: Op, dims: Mapping[str, Any], args: tuple[Any, ...]) -> Any:
    try:
        return op.cost(*args)
    except RuntimeError:
        # The cost depends on values, such as the lengths of sequences: use small real arguments of the same kind.
        assert op.make is not None
        return op.cost(*op.make(Inputs("cpu"), **dims))


def _why_not(impl: Any, op: Op, choice: Choice, device: Device, problem: Any, args: tuple[Any, ...]) -> str:
    """Why an implementation was not chosen."""
    reason = impl.refusal(device, problem, scope())
    if reason is not None:
        return f"refuses: {reason}"
    if scope().preferred == choice.impl.name:
        return f"{choice.impl.name} is preferred"
    rows = measured(op.name, problem, device, scope().invariant) if device.kind == "cuda" else {}
    mine, taken = rows.get(impl.name), rows.get(choice.impl.name)
    if mine is not None and taken is not None:
        return f"slower by {mine.us / taken.us - 1:.0%}: {mine.us:.1f} us, {choice.impl.name} {taken.us:.1f} us"
    if choice.entry is not None:
        return "not measured, while another implementation was"
    order = [i.name for i in op.impls]
    place = f"listed {'after' if order.index(impl.name) > order.index(choice.impl.name) else 'before'} {choice.impl.name}"
    if op.first(device, problem) == choice.impl.name:
        place = f"{choice.impl.name} comes first for this problem"
    config = impl.space.default(device, problem)
    facts = config_facts(op.name, impl.name, device.arch).get(config_key(config))
    guess = _predicted(impl, config, args, device, [] if facts is None else [vars(facts)])
    return f"not measured; {place}" + (f"; predicted {guess['us']:.1f} us" if guess else "")


def _predicted(
    impl: Impl, config: Mapping[str, Any], args: tuple[Any, ...], device: Device, kernels: Sequence[Mapping[str, Any]]
) -> dict[str, Any] | None:
    """The time that the analytical model predicts, for a library or for one kernel with known facts; None if it cannot."""
    if impl.work is None or device.kind != "cuda":
        return None
    work = impl.work(device, config, *args)
    if not work.library and (len(kernels) != 1 or kernels[0].get("error")):
        return None
    names = ("warps", "registers", "spill_bytes", "shared_bytes")
    facts = (
        None
        if work.library
        else ConfigFacts(
            **{name: kernels[0][name] for name in names}, blocks_per_sm=kernels[0]["blocks_per_sm"], limiter="", error=None
        )
    )
    try:
        said = predict(device, work, facts)
    except ValueError:
        return None  # no block fits an SM, or the card has no such unit: the kernel's lines in the output say so
    return {
        "us": 1e6 * said.seconds,
        "limiter": said.limiter,
        "parts_us": {name: 1e6 * seconds for name, seconds in said.parts.items()},
        "fitted": said.fitted,
    }


def _kernels(choice: Choice, args: tuple[Any, ...], device: Device) -> tuple[list[dict[str, Any]], str | None]:
    """The kernels of the launch, compiled for the card; if they cannot be compiled, an empty list and the reason."""
    try:
        binaries = record(choice.impl, choice.config, args, device.arch)
    except (CompileFailed, RuntimeError) as error:
        return [], str(error)
    return [_kernel(binary, device) for binary in binaries], None


def _kernel(binary: Binary, device: Device) -> dict[str, Any]:
    found = facts(binary)
    held = occupancy(device.arch, threads=32 * found.warps, registers=found.registers, shared_bytes=found.shared_bytes)
    row: dict[str, Any] = {
        "kernel": binary.kernel,
        "blocks": binary.blocks,
        "warps": found.warps,
        "registers": found.registers,
        "spill_bytes": found.spill_bytes,
        "shared_bytes": found.shared_bytes,
        "tensor_cores": "tcgen05" if found.tcgen05 else "wgmma" if found.wgmma else "mma" if found.mma else "none",
        "tma": bool(found.tma_loads),
        "blocks_per_sm": held.blocks,
        "occupancy": held.fraction,
        "occupancy_limiter": held.limiter,
        "occupancy_cliffs": [str(cliff) for cliff in held.cliffs],
    }
    if binary.blocks and held.blocks:
        wave = waves(binary.blocks, sms=device.sms, blocks_per_sm=held.blocks)
        row["waves"] = {**asdict(wave), "waves": wave.waves, "efficiency": wave.efficiency}
    return row


def _library_product(op: Op, choice: Choice, args: tuple[Any, ...]) -> Product | None:
    """The product that a library's kernel computes, if it is one of 16-bit numbers, both dense along K; else None."""
    if op.name != "linear" or not choice.impl.library:
        return None
    x, weight = args[:2]
    if x.element_size() != 2 or x.stride(-1) != 1 or weight.stride(-1) != 1:
        return None
    batch = x.shape[0] if x.dim() == 3 else 1
    return Product(m=x.shape[-2], n=weight.shape[-2], k=x.shape[-1], batch=batch)


def _tiles(product: Product, tile: tuple[int, int], device: Device) -> dict[str, Any]:
    """The waves of a product in tiles of one size."""
    found = tile_waves(product, tile, device.sms)
    return {"tile": f"{tile[0]} x {tile[1]}", **asdict(found), "waves": found.waves, "efficiency": found.efficiency}


def _cliffs(op: Op, dims: Mapping[str, Any], choice: Choice, device: Device) -> Iterator[str]:
    """Sizes next to this one for which another implementation or config is chosen."""
    assert op.make is not None
    sizes = [name for name, value in dims.items() if isinstance(value, int) and not isinstance(value, bool) and value > 1]
    for name in sizes:
        for step in (-1, 1):
            near = {**dims, name: dims[name] + step}
            try:
                with on_card(device):
                    other = op.choose(device, op.problem(*op.make(Inputs("meta"), **near)))
            except (Refused, ValueError, RuntimeError) as error:
                yield f"{name}={near[name]}: {str(error).splitlines()[0]}"
                continue
            if other.impl.name != choice.impl.name:
                yield f"{name}={near[name]}: {other.impl.name} instead of {choice.impl.name}"
            elif dict(other.config) != dict(choice.config):
                changed = {k: v for k, v in other.config.items() if choice.config.get(k) != v}
                yield f"{name}={near[name]}: the same implementation with {', '.join(f'{k}={v}' for k, v in changed.items())}"


def _advice(op: Op, answer: Mapping[str, Any]) -> Iterator[str]:
    words = " ".join(f"{name}={value}" for name, value in answer["dims"].items())
    if answer["source"] not in ("exact", "fixed"):
        yield f"measure it with: tilewright tune {op.name} {words}"
    for kernel in answer["kernels"]:
        name = kernel["kernel"]
        if kernel["spill_bytes"]:
            yield f"{name} spills {kernel['spill_bytes']} bytes per thread; a smaller tile or more warps may avoid this"
        if (wave := kernel.get("waves")) and wave["waves"] <= 4 and wave["efficiency"] < 0.75:
            idle = f"{wave['tail']} of {wave['slots']} blocks in the last wave"
            yield f"{name}: {idle}; smaller tiles, or splitting the summed dimension, would fill the GPU"
        for cliff in kernel["occupancy_cliffs"]:
            if cliff.startswith(tuple(f"{n} register" for n in range(1, 9))) and "fewer: " in cliff:
                yield f"{name}: {cliff}"
    if not str(answer["roofline"]["ceilings"]).startswith("measured"):
        yield "the ceilings are from the data sheet; tilewright hw --measure on this GPU measures them"
