"""`tilewright hw`: shows this machine's hardware and limits, and how a kernel would use an SM or a card."""

import json
import sys
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewright.cli.root import app, plain_errors, say

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["hw"]

_EXAMPLES = (
    "[b]Examples[/b]\n\n"
    "tilewright hw --measure\n\n"
    "tilewright hw occupancy --arch 90 --threads 256 --registers 128 --shared 65536\n\n"
    "tilewright hw waves --blocks 120 --sms 108"
)
hw = typer.Typer(
    help="Describe this machine: GPUs, links, NCCL and measured ceilings. Compute a kernel's occupancy and waves.",
    epilog=_EXAMPLES,
)
app.add_typer(hw, name="hw")

_Json = Annotated[bool, typer.Option("--json", help="print the result as JSON")]
Facts = dict[str, Any]


@hw.callback(invoke_without_command=True)
def machine(
    context: typer.Context,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="measure the GPUs' highest bandwidth and speed and keep the result; takes a minute at most"
        ),
    ] = False,
    as_json: _Json = False,
) -> None:
    """Print the machine's devices, the links between them, NCCL, and the ceilings (highest measured speeds)."""
    if context.invoked_subcommand is not None:
        return
    with plain_errors(context):
        found = _machine(measure)
        if as_json:
            print(json.dumps(found, indent=1))
        else:
            _print(found)


def _machine(measure: bool) -> Facts:
    from tilewright.hw.cpu import cpu
    from tilewright.hw.nccl import installed
    from tilewright.hw.nvml import NoDriver, cuda_version, session
    from tilewright.hw.topology import topology

    found: Facts = {"cpu": asdict(cpu()), **_software()}
    try:
        with session() as nvml:
            top = topology(nvml)
            found |= {"driver": str(nvml.nvmlSystemGetDriverVersion()), "cuda_of_driver": cuda_version(nvml)}
    except NoDriver as error:
        if measure:
            raise ValueError(
                f"{error}: there is nothing to measure; `tilewright explain OP ... --card h100` needs no GPU"
            ) from None
        return {**found, "driver": None, "no_driver": str(error), "nccl": [asdict(n) for n in installed()]}
    found["gpus"] = [asdict(gpu) | _seen_by_cuda(gpu.pci_id) for gpu in top.gpus]
    found["nics"] = [asdict(nic) for nic in top.nics]
    found["topology"] = {"names": top.names, "matrix": top.matrix, "peers": top.peers}
    if measure:
        _measure()
    found["ceilings"] = _ceilings()
    found["links"] = _links()
    return {**found, "nccl": [asdict(n) for n in installed()]}


def _software() -> Facts:
    import torch

    from tilewright.hw.nccl import version_of_torch

    return {
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl_of_torch": version_of_torch(),
    }


def _seen_by_cuda(address: str) -> Facts:
    """Facts about a GPU that only CUDA reports, if this process may see it."""
    from tilewright.hw.device import cuda_count, device_of, pci_id

    index = next((i for i in range(cuda_count()) if pci_id(i) == address), None)
    if index is None:
        return {"cuda_index": None}
    device = device_of(index)
    return {"cuda_index": index, "sms": device.sms, "smem_bytes": device.smem_bytes, "l2_bytes": device.l2_bytes}


def _measure() -> None:
    """Measure the GPUs that CUDA sees, and store the results."""
    from tilewright.hw.ceilings import path_of, save, write_json
    from tilewright.hw.device import cuda_count, device_of
    from tilewright.hw.measure import cards, measure

    if not cuda_count():
        raise ValueError(
            "torch sees no GPU although there is a driver; check CUDA_VISIBLE_DEVICES, and whether torch was built with CUDA"
        )
    for i in cards():
        found, facts = measure(i, say)
        save(found, path_of(device_of(i)), facts)
        say(f"stored in {path_of(device_of(i))}")
        for unit, reason in facts["failed"].items():
            say(f"not measured: {unit}: {reason}")
    if cuda_count() > 1:
        from tilewright.hw.links import measure_links, path_of_links

        links = measure_links(say)
        write_json(path_of_links(), links)
        say(f"stored in {path_of_links()}")


def _ceilings() -> list[Facts]:
    """One entry for each kind of card that CUDA sees; the key "error" says that nothing is known about the card."""
    from tilewright.hw.ceilings import ceilings
    from tilewright.hw.device import cuda_count, device_of

    names = {device_of(i).name: device_of(i) for i in range(cuda_count())}
    found = []
    for name, device in names.items():
        try:
            found.append({"device": name, **asdict(ceilings(device))})
        except ValueError as error:
            found.append({"device": name, "error": str(error)})
    return found


def _links() -> Facts | None:
    """The stored measurement of the links between these GPUs; None if there is one GPU, or no measurement."""
    from tilewright.hw.device import cuda_count

    if cuda_count() < 2:
        return None
    from tilewright.hw.links import read_links

    try:
        return read_links()
    except ValueError as error:
        return {"error": str(error)}


# ---- for people


def _table(out: "Console", title: str, *columns: str) -> "Table":
    """A table with its title on a separate line: rich breaks a title that is wider than the table."""
    from rich.table import Table

    out.print(title, style="bold", soft_wrap=True)
    return Table(*columns)


def _print(found: Facts) -> None:
    from rich.console import Console

    out = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    cpu = found["cpu"]
    out.print(f"CPU  {cpu['name']}, {cpu['cores']} cores, {cpu['memory_bytes'] / 2**30:.0f} GiB")
    if found["driver"] is None:
        out.print(f"GPU  none: {found['no_driver']}")
    else:
        cudnn = found["cudnn"]
        cudnn = f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}" if cudnn else "none"
        out.print(f"driver {found['driver']}, supports CUDA up to {found['cuda_of_driver']}")
        out.print(
            f"torch {found['torch']}, CUDA {found['cuda'] or 'none'}, cuDNN {cudnn}, NCCL {found['nccl_of_torch'] or 'none'}"
        )
        _print_gpus(found, out)
        _print_topology(found, out)
        _print_ceilings(found["ceilings"], out)
        if found["links"]:
            _print_links(found["links"], out)
    for nccl in found["nccl"]:
        out.print(f"NCCL {nccl['version']}{' (loaded)' if nccl['loaded'] else ''}  {nccl['path']}", soft_wrap=True)
    if not found["nccl"]:
        out.print("NCCL none found")


def _print_gpus(found: Facts, out: "Console") -> None:
    table = _table(
        out, "GPUs", "", "name", "arch", "SMs", "memory GiB", "L2 MiB", "SM MHz (most)", "memory MHz", "power W", "PCI"
    )
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
            str(clocks.get("memory", "?")),
            "" if g["power_limit_w"] is None else f"{g['power_limit_w']:.0f}",
            g["pci_id"],
        )
    out.print(table)


def _print_topology(found: Facts, out: "Console") -> None:
    names, top = found["topology"]["names"], found["topology"]
    if len(names) > 1:
        table = _table(out, "links", "", *names)
        for name, row in zip(names, top["matrix"], strict=True):
            table.add_row(name, *row)
        out.print(table)
    for i, nic in enumerate(found["nics"]):
        out.print(f"NIC{i} {nic['name']}")
    for g in found["gpus"]:
        for (state, version, speed, remote), group in groupby(g["links"], key=_link_words):
            links = [str(link["index"]) for link in group]
            which = links[0] if len(links) == 1 else f"{links[0]} to {links[-1]}"
            out.print(f"GPU{g['index']} NVLink {which}: {state}, version {version}{speed}{remote}")
    cells = [[", ".join(can) for can in row] for row in top["peers"]]
    others = {cell for i, row in enumerate(cells) for j, cell in enumerate(row) if i != j}
    if len(others) == 1:
        out.print(f"GPU to GPU without the host, every pair: {others.pop() or 'nothing'}")
    elif others:
        table = _table(out, "GPU to GPU without the host", "", *names[: len(cells)])
        for name, row in zip(names, cells, strict=False):
            table.add_row(name, *row)
        out.print(table)


def _link_words(link: Facts) -> tuple[str, str, str, str]:
    speed = "" if link["mb_per_s"] is None else f", {link['mb_per_s'] / 1000:.1f} GB/s each way"
    return (
        "active" if link["active"] else "inactive",
        link["version"],
        speed,
        f", to {link['remote']}" if link["active"] else "",
    )


def _print_ceilings(found: list[Facts], out: "Console") -> None:
    for c in found:
        if "error" in c:
            out.print(f"ceilings of {c['device']}: {c['error']}", soft_wrap=True)
            continue
        table = _table(out, f"ceilings of {c['device']}: {c['source']}", "what", "at most")
        for name, what in (("copy", "copy"), ("read", "read"), ("write", "write"), ("l2", "copy within L2")):
            table.add_row(what, f"{c[name] / 1e12:.2f} TB/s")
        for unit, value in c["flops"].items():
            sheet = " (data sheet)" if unit in c["unmeasured"] else ""
            table.add_row(unit, f"{value / 1e12:.0f} T{'FLOP' if unit != 'int8' else 'OP'}/s{sheet}")
        out.print(table)


def _print_links(found: Facts, out: "Console") -> None:
    if "error" in found:
        out.print(found["error"], soft_wrap=True)
        return
    out.print(f"GPU to GPU, measured {found['date'][:10]}", style="bold")
    for i, row in enumerate(found.get("peer_copy_bytes_per_s", ())):
        out.print(f"GPU{i} copies to each, GB/s: " + "  ".join("-" if v is None else f"{v / 1e9:.0f}" for v in row))
    for what, rate in (("copies_0_to_1", "gb_per_s"), ("all_reduce", "bus_gb_per_s")):
        if what in found:
            table = _table(out, what.replace("_", " "), "bytes", "us", f"{'bus ' * (rate != 'gb_per_s')}GB/s")
            for row in found[what]:
                table.add_row(f"{row['bytes']:,}", f"{row['us']:.1f}", f"{row[rate]:.1f}")
            out.print(table)
    for what, reason in found["failed"].items():
        out.print(f"not measured: {what}: {reason}", soft_wrap=True)


# ---- a kernel on a card


@hw.command("occupancy")
def occupancy_of(
    context: typer.Context,
    threads: Annotated[int, typer.Option(help="threads per block")],
    registers: Annotated[int, typer.Option(help="registers per thread")],
    arch: Annotated[int, typer.Option(help="GPU architecture: 80, 86, 87, 89, 90, 100, 103, 120 or 121")] = 90,
    shared: Annotated[int, typer.Option(help="shared memory per block, in bytes")] = 0,
    barriers: Annotated[int, typer.Option(help="named barriers per block")] = 0,
    as_json: _Json = False,
) -> None:
    """Compute how many blocks of a kernel fit on one SM, what limits them, and which changes raise or lower the number."""
    with plain_errors(context):
        from tilewright.hw.occupancy import occupancy

        found = occupancy(arch, threads=threads, registers=registers, shared_bytes=shared, barriers=barriers)
        if as_json:
            cliffs = [{**asdict(cliff), "words": str(cliff)} for cliff in found.cliffs]
            print(json.dumps({**asdict(found), "cliffs": cliffs}))
            return
        blocks = f"{found.blocks} block{'s' * (found.blocks != 1)}"
        print(f"{blocks}, {found.warps} of {found.sm.warps} warps an SM ({found.fraction:.0%}); limited by {found.limiter}")
        for cliff in found.cliffs:
            print(f"  {cliff}")


@hw.command("waves")
def waves_of(
    context: typer.Context,
    blocks: Annotated[int, typer.Option(help="number of thread blocks in the grid")],
    sms: Annotated[int, typer.Option(help="number of SMs of the GPU: A100 108, H100 132, B200 148")] = 132,
    blocks_per_sm: Annotated[int, typer.Option(help="number of blocks that fit on one SM")] = 1,
    as_json: _Json = False,
) -> None:
    """Compute the waves of a grid, the size of the last wave, and the share of the GPU's time that is used."""
    with plain_errors(context):
        from tilewright.hw.waves import waves

        found = waves(blocks, sms=sms, blocks_per_sm=blocks_per_sm)
        if as_json:
            print(json.dumps({**asdict(found), "waves": found.waves, "total": found.total, "efficiency": found.efficiency}))
            return
        tail = f", the last with {found.tail} of {found.slots} blocks" if found.tail else ""
        print(f"{found.waves} wave{'s' * (found.waves != 1)}{tail}; {found.efficiency:.1%} of the card's time is used")
