"""`tilewright asm`: shows what a kernel compiles to, for any card, on any machine."""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from tilewright.cli.root import app, plain_errors

if TYPE_CHECKING:
    from tilewright.asm.compile import Binary
    from tilewright.asm.judge import Judgement
    from tilewright.asm.memory import Memory
    from tilewright.hw.device import Device
    from tilewright.op import Impl, Op

__all__ = ["asm"]

SHOWN = ("ttgir", "ptx", "sass")


class Built(NamedTuple):
    """One implementation compiled for one architecture, or why it was not."""

    impl: "Impl"
    arch: int
    at: str
    """The label of the example, or the dimensions."""
    config: Mapping[str, Any]
    binaries: "list[Binary]"
    judgements: "list[Judgement]"
    problem: str | None
    """A sentence if it was refused or does not compile; else None."""


@app.command(
    epilog="[b]Examples[/b]\n\n"
    "tilewright asm matmul --impl triton --arch 80,90,100\n\n"
    "tilewright asm matmul M=4096 N=4096 K=4096 --impl triton_tma --arch 90 --config BLOCK_N=256\n\n"
    "tilewright asm softmax --example wide --arch 90 --show sass"
)
def asm(
    context: typer.Context,
    op: Annotated[str, typer.Argument(help="operator, such as matmul, softmax or rms_norm")],
    dims: Annotated[
        list[str] | None,
        typer.Argument(
            help="dimensions and dtype, such as M=4096 dtype=bf16; default: the last problem of `bench OP` that "
            "the implementation accepts"
        ),
    ] = None,
    impl: Annotated[str | None, typer.Option(help="only this implementation; default: all")] = None,
    example: Annotated[str | None, typer.Option(help="use this example of the operator instead of dimensions")] = None,
    arch: Annotated[str, typer.Option(help="GPU architectures, separated by commas, such as 80,90,100")] = "80,90,100",
    config: Annotated[
        list[str] | None,
        typer.Option(
            "--config", help="change a parameter of the default config, such as BLOCK_M=128; may be given several times"
        ),
    ] = None,
    show: Annotated[str | None, typer.Option(help="print this code instead: ttgir, ptx or sass")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Compile an operator's kernels without a GPU; report registers, occupancy, instructions, memory accesses and layouts."""
    with plain_errors(context):
        if show is not None and show not in SHOWN:
            raise typer.BadParameter(f"--show is {show!r}, wanted one of {', '.join(SHOWN)}")
        built = list(_build(op, dims or [], impl, example, arch, config or [], judged=show is None))
        if not any(b.binaries for b in built):
            raise ValueError("; ".join(dict.fromkeys(f"{b.impl.name} on sm_{b.arch}, {b.at}: {b.problem}" for b in built)))
        if show is not None:
            _print_code(built, show, as_json)
        elif as_json:
            print(json.dumps([_plain(b) for b in built], indent=1))
        else:
            _print(built)


# ---- compiling


def _build(
    name: str, words: list[str], impl: str | None, label: str | None, arch: str, config: list[str], *, judged: bool
) -> Iterator[Built]:
    from tilewright.asm.compile import CompileFailed, record
    from tilewright.asm.judge import judge
    from tilewright.bench.dims import find_op
    from tilewright.hw import env

    if env.interpreting():
        raise ValueError("TRITON_INTERPRET is set: Triton compiles no kernel in this process; unset it")
    op = find_op(name)
    impls = _impls(op, impl)
    calls = _calls(op, words, label)
    cards = _cards(arch)
    choices = _choices(impls, config)
    for one in [i for i in impls if not choices or choices.keys() & i.space.axes.keys()]:
        for card in cards:
            at, args, refusal = _first_taken(op, one, card, calls)
            if refusal is not None:
                yield Built(one, card.arch, at, {}, [], [], f"refused: {refusal}")
                continue
            problem = op.problem(*args)
            chosen = {**one.space.default(card, problem), **{k: v for k, v in choices.items() if k in one.space.axes}}
            if choices and (reason := one.space.refusal(card, problem, chosen)):
                yield Built(one, card.arch, at, chosen, [], [], f"outside the space: {reason}")
                continue
            try:
                binaries = record(one, chosen, args, card.arch)
            except CompileFailed as error:
                yield Built(one, card.arch, at, chosen, [], [], str(error))
                continue
            judgements = [judge(binary) for binary in binaries] if judged else []
            yield Built(one, card.arch, at, chosen, binaries, judgements, None if binaries else "launches no Triton kernel")


def _impls(op: "Op", name: str | None) -> "list[Impl]":
    from tilewright.bench.dims import nearest

    found = [impl for impl in op.impls if name in (None, impl.name)]
    if not found:
        raise ValueError(f"{op.name} has no implementation {name!r}: {nearest(str(name), [i.name for i in op.impls])}")
    return found


def _calls(op: "Op", words: list[str], label: str | None) -> list[tuple[str, tuple[Any, ...]]]:
    """(label, arguments) of the calls to try, in order: large ones first; special implementations may accept only small
    ones."""
    from tilewright.bench.dims import nearest, parse_dims
    from tilewright.bench.peers import default_shapes
    from tilewright.op import Inputs

    if words and label is not None:
        raise ValueError(f"give either dimensions ({' '.join(words)}) or --example {label!r}, not both")
    if label is None and (words or op.make is not None):
        shapes = [words] if words else [text.split() for text in reversed(default_shapes(op.name))]
        dims = [parse_dims(op, shape) for shape in shapes]
        assert op.make is not None, "parse_dims refuses an op without it"
        return [(" ".join(shape), op.make(Inputs("meta"), **given)) for shape, given in zip(shapes, dims, strict=True)]
    examples = [example for example in op.examples if label in (None, example.label)]
    if not examples:
        raise ValueError(f"{op.name} has no example {label!r}: {nearest(str(label), [e.label for e in op.examples])}")
    return [(example.label, example.make(Inputs())) for example in examples]


def _cards(text: str) -> "list[Device]":
    from tilewright.hw.device import CARD_OF_ARCH, CARDS

    known = {card.arch: card for card in CARDS.values()} | CARD_OF_ARCH
    found = []
    for word in text.replace("sm_", "").split(","):
        if not word.strip().isdigit() or int(word) not in known:
            raise ValueError(f"--arch contains {word.strip()!r}, wanted some of {','.join(map(str, sorted(known)))}")
        found.append(known[int(word)])
    return found


def _choices(impls: "list[Impl]", words: list[str]) -> dict[str, Any]:
    """The values of --config: each key must be an axis of some implementation, and the value must be on that axis."""
    from tilewright.bench.dims import nearest

    found: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        axes = [impl.space.axes[key] for impl in impls if key in impl.space.axes]
        if not equals or not axes:
            known = dict.fromkeys(axis for impl in impls for axis in impl.space.axes)
            raise ValueError(f"--config is {word!r}, wanted AXIS=VALUE: {nearest(key, known)}")
        values = {str(value): value for axis in axes for value in axis}
        if text not in values:
            raise ValueError(f"--config {key} is {text!r}, outside the space: {nearest(text, values)}")
        found[key] = values[text]
    return found


def _first_taken(
    op: "Op", impl: "Impl", card: "Device", calls: list[tuple[str, tuple[Any, ...]]]
) -> tuple[str, tuple[Any, ...], str | None]:
    """(label, arguments, None) of the first call that launches something; otherwise the first call with the reason."""
    reasons = []
    for label, args in calls:
        reason = impl.refusal(card, op.problem(*args))
        if reason is None:
            return label, args, None
        reasons.append((label, args, reason))
    return reasons[0]


# ---- showing


def _plain(built: Built) -> dict[str, Any]:
    """As values for JSON."""
    return {
        "impl": built.impl.name,
        "arch": built.arch,
        "at": built.at,
        "config": dict(built.config),
        "problem": built.problem,
        "kernels": [asdict(judgement) for judgement in built.judgements],
    }


def _print_code(built: list[Built], kind: str, as_json: bool) -> None:
    from tilewright.asm.facts import sass

    found = []
    for b in built:
        for binary in b.binaries:
            text = sass(binary) if kind == "sass" else getattr(binary, kind)
            found.append({"impl": b.impl.name, "arch": b.arch, "at": b.at, "kernel": binary.kernel, kind: text})
    if as_json:
        print(json.dumps(found))
        return
    for one in found:
        print(f"// {one['kernel']}, {one['impl']}, {one['at']}, sm_{one['arch']}\n{one[kind]}")


def _print(built: list[Built]) -> None:
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    groups: dict[tuple[str, str], list[Built]] = {}
    for b in built:
        groups.setdefault((b.impl.name, b.at), []).append(b)
    for (impl, at), group in groups.items():
        done = [b for b in group if b.binaries]
        if done:
            console.print(_table(f"{impl}, {at}", done))
            for title, lines in _details(done):
                console.print(f"[b]{title}[/b]")
                for line, archs in lines.items():
                    everywhere = len(archs) == len(done)
                    console.print("  " + ("" if everywhere else f"{', '.join(archs)}: ") + line, markup=False, soft_wrap=True)
            console.print()
        for problem in dict.fromkeys(b.problem for b in group if b.problem):
            archs = ", ".join(f"sm_{b.arch}" for b in group if b.problem == problem)
            console.print(f"{impl}, {at}, {archs}: {problem}", markup=False, soft_wrap=True)


def _table(title: str, group: Sequence[Built]) -> Any:
    """A table with a row for each fact, and a column for each kernel and architecture."""
    from rich.table import Table

    columns = [(b, j) for b in group for j in b.judgements]
    table = Table("", *(f"{j.kernel} sm_{b.arch}" for b, j in columns), title=title, title_justify="left")
    rows = [_rows(b, j) for b, j in columns]
    for name in dict.fromkeys(name for row in rows for name in row):
        table.add_row(name, *(row.get(name, "") for row in rows))
    return table


def _rows(built: Built, j: "Judgement") -> dict[str, str]:
    f, o = j.facts, j.occupancy
    rows = {
        "config": " ".join(f"{k}={v}" for k, v in built.config.items()) or "-",
        "registers a thread": f"{f.registers}" + (f", {f.spill_bytes} bytes spilled" if f.spill_bytes else ", no spills"),
        "shared memory": f"{f.shared_bytes:,} bytes",
        "occupancy": f"{_count(o.blocks, 'block')} of {_count(f.warps, 'warp')}, {o.fraction:.0%}; limited by {o.limiter}",
        "next steps": "\n".join(str(cliff) for cliff in o.cliffs if cliff.resource != "threads"),
        "instructions": ", ".join(f"{count} {kind}" for kind, count in j.instructions.items()),
        "pipeline": _pipeline(j.memory),
        "global loads": _widths(f.loads),
        "global stores": _widths(f.stores),
    }
    if j.partitions:
        told = (f"{_count(p.warps, 'warp')}{f' of {p.registers} registers' if p.registers else ''}" for p in j.partitions)
        rows["further partitions"] = "; ".join(told)
    if f.tmem_columns:
        rows["tensor memory"] = f"{f.tmem_columns} columns"
    if f.local_bytes:
        rows["arrays in local memory"] = f"{f.local_bytes} bytes a thread"
    return rows


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"


def _pipeline(memory: "Memory") -> str:
    if not memory.pipeline_depth:
        return "none"
    buffers = (f"{n} times {text}" if n > 1 else text for text, n in Counter(memory.buffers).items())
    waits = "" if memory.copies_in_flight is None else f"; waits with {memory.copies_in_flight} groups of cp.async in flight"
    return f"{memory.pipeline_depth} deep: {'; '.join(buffers)}{waits}"


def _widths(counts: Mapping[int, int]) -> str:
    """The number of accesses by bytes per thread, widest first."""
    return ", ".join(f"{n} of {width} bytes" for width, n in counts.items()) or "none by threads"


def _details(group: Sequence[Built]) -> Iterator[tuple[str, dict[str, list[str]]]]:
    """Title -> lines, each with the architectures to which it applies."""
    for title, tell in _SECTIONS:
        lines: dict[str, list[str]] = {}
        for b in group:
            for judgement in b.judgements:
                for line in tell(judgement):
                    archs = lines.setdefault(line, [])
                    if f"sm_{b.arch}" not in archs:
                        archs.append(f"sm_{b.arch}")
        if lines:
            yield title, lines


def _accesses(j: "Judgement") -> Iterator[str]:
    for a in j.memory.accesses:
        named = f" of {a.value}" if a.value and not a.value.isdigit() else ""
        asked = "1 sector" if a.sectors == 1 else f"{a.sectors} sectors"
        wasted = "the least for its bytes" if a.sectors == a.least_sectors else f"{a.least_sectors} would be enough"
        known = "" if a.exact else " (row strides are unknown)" if a.sectors == a.least_sectors else " (partly unknown)"
        yield f"{a.op}{named}, {a.tile}: {a.thread_bytes} bytes a thread, a warp asks for {asked}, {wasted}{known}"


def _copies(j: "Judgement") -> Iterator[str]:
    for c in j.memory.copies:
        yield f"{c.op} of {c.tile}: {c.tile_bytes:,} bytes a copy; {c.layout}"


def _conflicts(j: "Judgement") -> Iterator[str]:
    for c in j.memory.conflicts:
        trips = "bank conflicts unknown" if c.extra_trips is None else "no bank conflicts"
        yield f"{c.op}, {c.tile}: {f'{c.extra_trips} extra trips per access (bank conflicts)' if c.extra_trips else trips}"


def _layouts(j: "Judgement") -> Iterator[str]:
    for name, sentence in j.memory.layouts.items():
        yield f"{name.partition('<')[0]}: {sentence}"


def _warned(j: "Judgement") -> Iterator[str]:
    yield from (f"{j.kernel} {warning}" for warning in j.warnings)


_SECTIONS = (
    ("global memory, by threads", _accesses),
    ("global memory, by TMA", _copies),
    ("shared memory", _conflicts),
    ("layouts", _layouts),
    ("warnings", _warned),
)
