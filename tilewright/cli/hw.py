"""`tilewright hw`: what machine is this, what can it do, and how a kernel would sit on it."""

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewright.cli.root import app, plain_errors, say

if TYPE_CHECKING:
    from rich.table import Table

    from tilewright.hw.topology import Topology

__all__ = ["hw"]

hw = typer.Typer(
    help="What machine is this: GPUs, links, NCCL; its ceilings; occupancy and waves of a kernel.",
    epilog="[b]Examples[/b]\n\n"
    "tilewright hw --measure\n\n"
    "tilewright hw occupancy --arch 90 --threads 256 --registers 128 --shared 65536\n\n"
    "tilewright hw waves --blocks 120 --sms 108",
)
app.add_typer(hw, name="hw")

_Json = Annotated[bool, typer.Option("--json", help="print JSON")]


@hw.callback(invoke_without_command=True)
def machine(
    context: typer.Context,
    measure: Annotated[bool, typer.Option("--measure", help="measure this machine's ceilings and keep them")] = False,
    as_json: _Json = False,
) -> None:
    """Print the machine: devices, the links between them, NCCL, ceilings."""
    if context.invoked_subcommand is not None:
        return
    with plain_errors(context):
        found = _machine(measure)
        if as_json:
            print(json.dumps(found, indent=1))
        else:
            _print(found)


def _machine(measure: bool) -> dict[str, Any]:
    from tilewright.hw.cpu import cpu
    from tilewright.hw.nccl import installed
    from tilewright.hw.nvml import NoDriver, session
    from tilewright.hw.topology import topology

    found: dict[str, Any] = {"cpu": asdict(cpu())}
    try:
        with session() as nvml:
            top = topology(nvml)
            found["driver"] = str(nvml.nvmlSystemGetDriverVersion())
    except NoDriver as error:
        if measure:
            raise ValueError(f"{error}: nothing to measure; `tilewright explain OP ... --card h100` needs no GPU") from None
        return {**found, "driver": None, "no_driver": str(error), "nccl": [asdict(n) for n in installed()]}
    found |= _software()
    found["gpus"] = [_gpu(gpu, top) for gpu in top.gpus]
    found["nics"] = [asdict(nic) for nic in top.nics]
    found["topology"] = {"names": top.names, "matrix": top.matrix, "peer_access": top.peer_access}
    found["ceilings"] = _ceilings(measure)
    if measure and len(found["ceilings"]) > 1:
        from tilewright.hw.links import all_reduce, peer_copies

        say("copies between GPUs")
        found["peer_copy_bytes_per_s"] = peer_copies()
        found["all_reduce"] = all_reduce(say)
    return {**found, "nccl": [asdict(n) for n in installed()]}


def _software() -> dict[str, Any]:
    import torch

    from tilewright.hw.nccl import version_of_torch

    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl_of_torch": version_of_torch(),
    }


def _gpu(gpu: Any, top: "Topology") -> dict[str, Any]:
    from tilewright.hw.device import cuda_count, device_of, pci_id

    seen = {pci_id(i): i for i in range(cuda_count())}
    facts = asdict(gpu)
    index = seen.get(gpu.pci_id)
    facts["cuda_index"] = index
    if index is not None:
        device = device_of(index)
        facts |= {"sms": device.sms, "smem_bytes": device.smem_bytes, "l2_bytes": device.l2_bytes}
    return facts


def _ceilings(measure: bool) -> list[dict[str, Any]]:
    """Of every GPU that CUDA sees."""
    from tilewright.hw.ceilings import ceilings
    from tilewright.hw.device import cuda_count, device_of

    found = []
    for i in range(cuda_count()):
        failed: dict[str, str] = {}
        if measure:
            from tilewright.hw.measure import measure as run

            _, facts = run(i, say)
            failed = facts["failed"]
        found.append({"cuda_index": i, **asdict(ceilings(device_of(i))), "failed": failed})
    return found


def _console() -> Any:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 160)


def _table(title: str, *columns: str) -> "Table":
    from rich.table import Table

    return Table(*columns, title=title, title_justify="left", title_style="bold")


def _print(found: dict[str, Any]) -> None:
    out = _console()
    cpu = found["cpu"]
    out.print(f"CPU  {cpu['name']}, {cpu['cores']} cores, {cpu['memory_bytes'] / 2**30:.0f} GiB")
    if found["driver"] is None:
        out.print(f"GPU  none: {found['no_driver']}")
    else:
        out.print(f"driver {found['driver']}, torch {found['torch']}, CUDA {found['cuda']}, cuDNN {found['cudnn']}")
        _print_gpus(found, out)
        _print_links(found, out)
        _print_ceilings(found, out)
    for nccl in found["nccl"]:
        out.print(f"NCCL {nccl['version']}{' (loaded)' if nccl['loaded'] else ''}  {nccl['path']}", soft_wrap=True)


def _print_gpus(found: dict[str, Any], out: Any) -> None:
    table = _table("GPUs", "", "name", "arch", "SMs", "memory GiB", "L2 MiB", "SM MHz (most)", "power W", "NVLinks")
    for g in found["gpus"]:
        clocks = g["clocks_mhz"]
        table.add_row(
            f"GPU{g['index']}" + ("" if g["cuda_index"] is not None else " (hidden)"),
            g["name"],
            f"sm_{g['arch']}",
            str(g.get("sms", "")),
            f"{g['memory_bytes'] / 2**30:.0f}",
            f"{g['l2_bytes'] / 2**20:.0f}" if "l2_bytes" in g else "",
            f"{clocks.get('sm', '?')} ({clocks.get('sm_max', '?')})",
            "" if g["power_limit_w"] is None else f"{g['power_limit_w']:.0f}",
            _nvlinks(g["links"]),
        )
    out.print(table)


def _nvlinks(links: list[dict[str, Any]]) -> str:
    active = [link for link in links if link["active"]]
    if not active or not active[0]["mb_per_s"]:
        return str(len(active)) if links else "none"
    return f"{len(active)} x {active[0]['mb_per_s'] / 1000:.1f} GB/s, version {active[0]['version']}"


def _print_links(found: dict[str, Any], out: Any) -> None:
    names = found["topology"]["names"]
    if len(names) > 1:
        table = _table("links", "", *names)
        for name, row in zip(names, found["topology"]["matrix"], strict=True):
            table.add_row(name, *row)
        out.print(table)
    for i, nic in enumerate(found["nics"]):
        out.print(f"NIC{i} {nic['name']}")
    for row in found.get("peer_copy_bytes_per_s", ()):
        out.print("copy to each GPU, GB/s: " + "  ".join("-" if v is None else f"{v / 1e9:.0f}" for v in row))
    for row in found.get("all_reduce", ()):
        out.print(f"all-reduce {row['bytes']:>11,} bytes: {row['us']:>9.1f} us, {row['bus_gb_per_s']:.1f} GB/s bus")


def _print_ceilings(found: dict[str, Any], out: Any) -> None:
    for c in found["ceilings"]:
        out.print(f"ceilings of cuda:{c['cuda_index']}: {c['source']}")
        table = _table("", "what", "most")
        for name in ("copy", "read", "write", "l2"):
            table.add_row(name, f"{c[name] / 1e12:.2f} TB/s")
        for unit, value in c["flops"].items():
            table.add_row(unit, f"{value / 1e12:.0f} TFLOP/s")
        for unit, reason in c["failed"].items():
            table.add_row(unit, f"not measured: {reason}")
        out.print(table)


@hw.command("occupancy")
def occupancy_of(
    context: typer.Context,
    threads: Annotated[int, typer.Option(help="threads of a block")],
    registers: Annotated[int, typer.Option(help="registers of a thread")],
    arch: Annotated[int, typer.Option(help="80, 86, 87, 89, 90, 100, 103 or 120")] = 90,
    shared: Annotated[int, typer.Option(help="bytes of shared memory of a block")] = 0,
    as_json: _Json = False,
) -> None:
    """Blocks of a kernel that one SM holds, what limits them, and the next step in each direction."""
    with plain_errors(context):
        from tilewright.hw.occupancy import occupancy

        found = occupancy(arch, threads=threads, registers=registers, shared_bytes=shared)
        if as_json:
            print(json.dumps(asdict(found)))
            return
        print(f"{found.blocks} blocks, {found.warps} warps an SM ({found.fraction:.0%}); limited by {found.limiter}")
        for cliff in found.cliffs:
            print(f"  {cliff}")


@hw.command("waves")
def waves_of(
    context: typer.Context,
    blocks: Annotated[int, typer.Option(help="thread blocks of the grid")],
    sms: Annotated[int, typer.Option(help="SMs of the card: 108 A100, 132 H100, 148 B200")] = 132,
    blocks_per_sm: Annotated[int, typer.Option(help="blocks that one SM holds")] = 1,
    as_json: _Json = False,
) -> None:
    """Waves of a grid, its tail, and the share of the card's time that is used."""
    with plain_errors(context):
        from tilewright.hw.waves import waves

        found = waves(blocks, sms=sms, blocks_per_sm=blocks_per_sm)
        if as_json:
            print(json.dumps({**asdict(found), "waves": found.waves, "efficiency": found.efficiency}))
            return
        tail = f", the last with {found.tail} of {found.slots} blocks" if found.tail else ""
        print(f"{found.waves} waves{tail}; {found.efficiency:.1%} of the card's time is used")
