"""The rate of a served model without its server: in the model's own process, while no requests come.

So the model need not be loaded and optimised a second time, which takes longer than the measurement. Code of the model's source
calls `wait_to_be_asked` while it builds the model; `ask` is called in another process, when the server has nothing to do. They
exchange two files in a folder.
"""

import gc
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewright.bench.provenance import environment
from tilewright.host.loaded import Loaded, rows_of

__all__ = ["ask", "rate_of", "rates", "wait_to_be_asked"]

ASKED, FOUND = "offline-asked.json", "offline-found.jsonl"
LOOK_S = 0.2


def rates(loaded: Loaded, example: Tensor, sizes: Sequence[int], seconds: float) -> Iterator[dict[str, Any]]:
    """Rows per second of a model with one input.

    Args:
        loaded: the model.
        example: [rows, ...] its input.
        sizes: numbers of rows in a call.
        seconds: for each measurement, after a warm-up.

    Yields:
        {"what": "offline", "rows", "tensors_in", "rows_per_s"} for each size, first with inputs on the device, then with inputs
        in locked memory of the host and outputs that are copied back.
    """
    cuda = loaded.device.type == "cuda"
    wait: Callable[[], None] = torch.cuda.synchronize if cuda else lambda: None
    for rows in sizes:
        host = rows_of(example, rows)
        host = host.pin_memory() if cuda else host
        device = host.to(loaded.device)
        ways: dict[str, Callable[[], Any]] = {
            "device": lambda device=device: loaded.module(device),
            "host": lambda host=host: loaded.call([host]),
        }
        for way, call in ways.items():
            rate = rate_of(call, wait, rows, seconds)
            yield {"what": "offline", "rows": rows, "tensors_in": way, "rows_per_s": round(rate, 1)}


def rate_of(call: Callable[[], Any], wait: Callable[[], None], rows: int, seconds: float) -> float:
    """Rows a second of calls one behind the other, for so many seconds after a warm-up."""
    with torch.no_grad():
        for _ in range(3):
            call()
        wait()
        count, began_s = 0, time.perf_counter()
        while time.perf_counter() - began_s < seconds:
            for _ in range(8):
                call()
            wait()
            count += 8
        return rows * count / (time.perf_counter() - began_s)


def wait_to_be_asked(folder: Path, example: Tensor) -> None:
    """Measure, in a thread of this process, when `ask` is called for the same folder."""
    threading.Thread(target=_answer, args=(folder, example), daemon=True).start()


def _answer(folder: Path, example: Tensor) -> None:
    while not (folder / ASKED).exists():
        time.sleep(LOOK_S)
    asked = json.loads((folder / ASKED).read_text())
    with (folder / FOUND).open("w") as file:
        try:
            loaded = next(one for one in gc.get_objects() if type(one) is Loaded)
            for said in rates(loaded, example, asked["sizes"], asked["seconds"]):
                print(json.dumps(said), file=file, flush=True)
            said = {"what": "environment", **environment(card=loaded.device.type == "cuda")}  # last, because it takes seconds
            print(json.dumps(said), file=file, flush=True)
        except (StopIteration, RuntimeError, ValueError) as error:
            why = f"the rate without requests cannot be measured: {type(error).__name__}: {error}"
            print(json.dumps({"what": "failed", "why": why}), file=file, flush=True)
        print(json.dumps({"what": "end"}), file=file, flush=True)


def ask(folder: Path, sizes: Sequence[int], seconds: float, wait_s: float) -> Iterator[dict[str, Any]]:
    """The results of `rates` in the process that waits to be asked, as they come, and a description of the machine.

    After `wait_s` seconds there is a failure instead of what is missing; the description may be missing without one.
    """
    found, end_s, read = folder / FOUND, time.monotonic() + wait_s, 0
    (folder / "asking").write_text(json.dumps({"sizes": list(sizes), "seconds": seconds}))
    os.replace(folder / "asking", folder / ASKED)
    while time.monotonic() < end_s:
        lines = found.read_text().split("\n")[:-1] if found.exists() else []
        for line in lines[read:]:
            said = json.loads(line)
            if said["what"] == "end":
                return
            yield said
        read = len(lines)
        time.sleep(LOOK_S)
    if read < 2 * len(sizes):
        yield {"what": "failed", "why": f"{read} of {2 * len(sizes)} rates without requests are there after {wait_s:.0f} s"}
