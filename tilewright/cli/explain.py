"""`tilewright explain`: explains which implementation a call uses and why, for any card."""

import json
from contextlib import ExitStack
from typing import Annotated, Any

import typer

from tilewright.cli.root import app, plain_errors

__all__ = ["explain"]


@app.command(
    epilog="[b]Examples[/b]\n\n"
    "tilewright explain matmul M=4096 N=4096 K=4096 dtype=bf16 --card h100\n\n"
    "tilewright explain paged_attention B=64 KV=8192 --card a100 --json"
)
def explain(
    context: typer.Context,
    op: Annotated[str, typer.Argument(help="operator, such as matmul, softmax or paged_attention")],
    dims: Annotated[
        list[str] | None, typer.Argument(help="dimensions and dtype, such as M=4096 N=4096 K=4096 dtype=bf16")
    ] = None,
    card: Annotated[
        str | None, typer.Option(help="GPU such as h100; it need not be in this machine; default: the GPU of this machine")
    ] = None,
    prefer: Annotated[str | None, typer.Option(help="explain the call as inside `with prefer(NAME)`")] = None,
    invariant: Annotated[bool, typer.Option("--invariant", help="explain the call as inside `with invariant()`")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Explain which implementation and config a call uses and why.

    Also shown: the lower bound on its time, its kernels, nearby sizes that are much slower, and what to try.
    """
    with plain_errors(context):
        from tilewright import op as ops
        from tilewright.bench.dims import find_op, nearest
        from tilewright.bench.explain import explain as answer
        from tilewright.bench.op import checked
        from tilewright.hw.device import cuda_count, device_named, device_of

        found = find_op(op)
        wanted = checked(found, dims or [])
        names = [impl.name for impl in found.impls]
        if prefer is not None and prefer not in names:
            raise ValueError(f"{found.name} has no implementation {prefer!r}: {nearest(prefer, names)}")
        if card is None and not cuda_count():
            raise ValueError("this machine has no GPU; give one, such as --card h100")
        device = device_named(card) if card is not None else device_of(0)
        with ExitStack() as scopes:
            if prefer is not None:
                scopes.enter_context(ops.prefer(prefer))
            if invariant:
                scopes.enter_context(ops.invariant())
            said = answer(found, wanted, device)
        if as_json:
            print(json.dumps(said, indent=1))
        else:
            _print(said)


def _print(said: dict[str, Any]) -> None:
    roof = said["roofline"]
    print(f"{said['op']} {' '.join(f'{k}={v}' for k, v in said['dims'].items())}  on {said['card']['name']}")
    config = " ".join(f"{k}={v}" for k, v in said["config"].items())
    print(f"  runs     {said['impl']} {config}".rstrip())
    print(f"  because  {said['source_in_words']}")
    for name, reason in said["others"].items():
        print(f"  not      {name}: {reason}")
    print(f"  floor    {roof['floor_us']:.1f} us by {roof['bound']}; ceilings {roof['ceilings']}")
    print(f"           {roof['flops'] / 1e9:.2f} GFLOP, {roof['bytes'] / 1e6:.2f} MB that must move")
    if guess := said["predicted"]:
        trust = "" if guess["fitted"] else "; the model is not fitted to this card"
        print(f"  model    {guess['us']:.1f} us, most of it {guess['limiter']}{trust}")
    if said["measured_us"] is not None:
        print(f"  measured {said['measured_us']:.1f} us, {said['of_roof']:.0%} of the roofline")
    else:
        print("  measured not on this card")
    for kernel in said["kernels"]:
        _print_kernel(kernel)
    if said["compile_error"]:
        print(f"  kernels  {said['compile_error']}")
    elif not said["kernels"]:
        print("  kernels  a library's, whose code is not visible")
    for number, tile in enumerate(said["library_tiles"]):
        head = "estimate" if not number else ""
        tail = f", {tile['tail']} of {tile['slots']} blocks in the last" if tile["tail"] else ""
        waves = (
            f"{tile['waves']} wave{'s' if tile['waves'] != 1 else ''}{tail}; {tile['efficiency']:.0%} of the slots have work"
        )
        print(f"  {head:<8} with tiles of {tile['tile']}, one per SM: {tile['blocks']} tiles, {waves}")
    for title, lines in (("cliff", said["cliffs"]), ("try", said["advice"])):
        for line in lines:
            print(f"  {title:<8} {line}")


def _print_kernel(kernel: dict[str, Any]) -> None:
    size = f"{kernel['blocks']} blocks of {kernel['warps']} warps, {kernel['registers']} registers"
    cores = f"tensor cores: {kernel['tensor_cores']}{', TMA' if kernel['tma'] else ''}"
    print(f"  kernel   {kernel['kernel']}: {size}, {kernel['shared_bytes']} bytes shared, {cores}")
    held = f"{kernel['blocks_per_sm']} blocks an SM ({kernel['occupancy']:.0%}), limited by {kernel['occupancy_limiter']}"
    print(f"           {'; '.join([held, *kernel['occupancy_cliffs'][:2]])}")
    if wave := kernel.get("waves"):
        tail = f", {wave['tail']} of {wave['slots']} blocks in the last" if wave["tail"] else ""
        print(f"           {wave['waves']} waves{tail}; {wave['efficiency']:.0%} of the slots have work")
