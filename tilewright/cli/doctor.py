"""`tilewright doctor`: shows what works on this machine, what is missing, and how to get it."""

import json
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Annotated, NamedTuple

import typer

from tilewright.cli.root import app, plain_errors

__all__ = ["Finding", "doctor"]

TESTED = {"torch": ((2, 11), (2, 15)), "triton": ((3, 6), (3, 9))}
"""The oldest and newest minor versions that the tests were run with."""
FOR = {
    "llm": "language models",
    "hub": "models from the Hugging Face hub",
    "serve": "`tilewright serve`",
    "structured": "answers that follow a grammar or a JSON schema",
    "grpc": "ordinary models over gRPC",
    "images": "images at `POST /predict/NAME`",
    "onnx": "models of ONNX files",
    "compare": "ONNX Runtime and OpenVINO in `tilewright compare`, and its HTML report",
    "data": "`tilewright data`",
    "ray": "`tilewright serve --ray`, and `tilewright data` and `tilewright rl` on several machines",
    "traces": "traces by OpenTelemetry of `tilewright serve`",
    "train": "TensorBoard beside `tilewright train`",
    "scaling": "`tilewright scaling`",
    "rl": "rewards and tasks of reinforcement learning",
    "lab": "the pictures of `tilewright lab`",
    "load": "`tilewright load`, and `tilewright serve --replicas`",
}
"""Extra -> its purpose."""


class Finding(NamedTuple):
    """One line of the result."""

    what: str
    state: str
    """"ok"; "missing": optional, and something else works without it; "broken": the package cannot do its work."""
    detail: str
    advice: str = ""


@app.command(epilog="[b]Examples[/b]\n\ntilewright doctor\n\ntilewright doctor --json")
def doctor(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Check what works on this machine, what is missing, and how to install it.

    The exit code is 1 if something is broken. A missing optional part is not an error.
    """
    with plain_errors(context):
        found = [finding for check in CHECKS for finding in check()]
        if as_json:
            print(json.dumps([finding._asdict() for finding in found], indent=1))
        else:
            for finding in found:
                print(f"{finding.state:<8} {finding.what:<18} {finding.detail}")
                if finding.advice:
                    print(f"{'':<27} {finding.advice}")
    raise typer.Exit(int(any(finding.state == "broken" for finding in found)))


def _system() -> Iterator[Finding]:
    name = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    if platform.system() == "Linux":
        yield Finding("system", "ok", name)
    else:
        yield Finding(
            "system",
            "missing",
            name,
            "Triton has no kernels on this system, so only the reference implementations run; use Linux",
        )


def _versions() -> Iterator[Finding]:
    import torch
    import triton

    for name, found in (("torch", str(torch.__version__)), ("triton", str(triton.__version__))):
        oldest, newest = TESTED[name]
        version = tuple(int(part) for part in found.split("+")[0].split(".")[:2])
        wanted = f"tested with {'.'.join(map(str, oldest))} to {'.'.join(map(str, newest))}"
        if version < oldest:
            yield Finding(name, "broken", f"{found}, {wanted}", f"pip install -U {name}")
        elif version > newest:
            yield Finding(
                name, "missing", f"{found} is newer than what was {wanted}", "`make test-newest` shows whether it works"
            )
        else:
            yield Finding(name, "ok", f"{found}, {wanted}")


def _gpu() -> Iterator[Finding]:
    import torch

    from tilewright.hw.device import cuda_count, device_of
    from tilewright.hw.nvml import NoDriver, driver_version

    try:
        driver = driver_version()
    except NoDriver as error:
        yield Finding(
            "GPU",
            "missing",
            str(error),
            "operators run their reference implementations on the CPU; `tilewright explain` needs no GPU",
        )
        return
    if not cuda_count():
        cause = (
            "torch was built without CUDA; install a build with CUDA"
            if torch.version.cuda is None
            else "check CUDA_VISIBLE_DEVICES"
        )
        yield Finding("GPU", "broken", f"driver {driver}, but torch sees no GPU", cause)
    for index in range(cuda_count()):
        device = device_of(index)
        words = f"{device.name}, sm_{device.arch}, driver {driver}"
        if device.arch < 80:
            yield Finding(f"GPU {index}", "broken", words, "kernels need sm_80 (A100, RTX 30) or newer")
        else:
            yield Finding(f"GPU {index}", "ok", words)
            yield _known(index)


def _known(index: int) -> Finding:
    """Whether the ceilings of such a card have been measured."""
    from tilewright.hw.ceilings import path_of
    from tilewright.hw.device import device_of

    path = path_of(device_of(index))
    if path.exists():
        return Finding(f"GPU {index} ceilings", "ok", f"measured, {path}")
    return Finding(f"GPU {index} ceilings", "missing", "from the data sheet", "tilewright hw --measure takes a minute")


def _compiler() -> Iterator[Finding]:
    found = next(filter(None, map(shutil.which, ("gcc", "clang", "cc"))), None)
    if found:
        yield Finding("C compiler", "ok", found)
    else:
        yield Finding("C compiler", "missing", "none found", "Triton builds its launchers with one: apt install gcc")


def _cache() -> Iterator[Finding]:
    from tilewright.hw.env import cache_dir

    folder = cache_dir()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if os.access(there, os.W_OK):
        yield Finding("cache", "ok", str(folder))
    else:
        yield Finding(
            "cache",
            "missing",
            f"{folder} cannot be written",
            "tuning records are lost; set XDG_CACHE_HOME to a folder that can be written",
        )


def _extras() -> Iterator[Finding]:
    from tilewright.extras import EXTRAS

    for extra, libraries in EXTRAS.items():
        missing = [library for library in libraries if find_spec(library) is None]
        if missing:
            install = f"for {FOR.get(extra, extra)}: pip install 'tilewright[{extra}]'"
            yield Finding(f"extra {extra}", "missing", f"without {', '.join(missing)}", install)
        else:
            yield Finding(f"extra {extra}", "ok", FOR.get(extra, ""))


def _model() -> Iterator[Finding]:
    from tilewright.models.errors import ModelError
    from tilewright.models.weights import resolve

    try:
        yield Finding("bookworm", "ok", str(resolve("bookworm")))
    except ModelError:
        advice = "it is in the repository; run from a clone, or give another model"
        yield Finding("bookworm", "missing", "the embedded model is not in this installation", advice)


def _run() -> Iterator[Finding]:
    """Compute a norm and a product on every device, and compare with float64."""
    import torch

    from tilewright import ops
    from tilewright.hw.device import cuda_count

    for place in ("cpu", *(f"cuda:{index}" for index in range(cuda_count()))):
        generator = torch.Generator().manual_seed(0)
        x, weight = (torch.randn(64, 64, generator=generator).to(place) for _ in range(2))
        try:
            got = ops.linear(ops.rms_norm(x, weight[0]), weight)
        except (RuntimeError, ValueError, OSError) as error:
            yield Finding(
                f"kernels, {place}", "broken", str(error).strip().splitlines()[0], "tilewright --traceback doctor shows more"
            )
            continue
        wide = torch.nn.functional.rms_norm(x.double(), (64,), weight[0].double(), 1e-6) @ weight.double().T
        error = ((got.double() - wide).norm() / wide.norm()).item()
        state = "ok" if error < 1e-3 else "broken"
        yield Finding(f"kernels, {place}", state, f"a norm and a product differ from float64 by {error:.0e}")


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (_system, _versions, _gpu, _compiler, _cache, _extras, _model, _run)
