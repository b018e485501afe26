"""A server of several processes with clients in separate processes, as measured by `bench front` and `bench served`."""

import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.bench.front_client import more_files
from tilewright.server.config import ServerConfig
from tilewright.server.logs import Log
from tilewright.server.serve import bind
from tilewright.server.supervisor import Supervisor, private_folder

__all__ = ["Found", "Processes", "clients", "finite", "quantiles_ms", "server"]

LOOK_S = 0.25
"""Seconds between two measurements of memory."""
_PAGE_KIB = os.sysconf("SC_PAGE_SIZE") >> 10


@dataclass(frozen=True)
class Processes:
    """The processes of one server, by their process numbers."""

    port: int
    fronts: tuple[int, ...]
    engine: int

    @property
    def all(self) -> tuple[int, ...]:
        """All process numbers."""
        return (*self.fronts, self.engine)

    def cpu_s(self) -> dict[int, float]:
        """Process number -> processor seconds so far."""
        return {pid: _cpu_s(pid) for pid in self.all}

    def memory_mib(self) -> float:
        """Resident memory of all processes together, in MiB."""
        pages = (int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in self.all)
        return sum(pages) * _PAGE_KIB / 1024


@dataclass
class Found:
    """The results of all clients."""

    said: list[dict[str, float]]
    gaps_s: np.ndarray
    """Seconds between two events of a stream, in the time in which all streams were open."""
    memory_mib: list[float] = field(default_factory=list)
    """Memory of the server, measured every `LOOK_S` seconds."""
    lost: int = 0
    """Idle connections that were lost before the end."""

    def total(self, name: str) -> float:
        """A result, summed over the clients."""
        return sum(one[name] for one in self.said)

    @property
    def seconds(self) -> float:
        """Seconds from the sending of the first request to the last event."""
        return max(one["last_s"] for one in self.said) - min(one["sent_s"] for one in self.said)

    @property
    def streaming_s(self) -> float:
        """Seconds from the first event to the last."""
        return max(one["last_s"] for one in self.said) - min(one["first_s"] for one in self.said)

    @property
    def growth_mib(self) -> float:
        """Growth of the server's memory after the first quarter of the run, in MiB."""
        at = len(self.memory_mib) // 4
        return max(self.memory_mib[at:]) - self.memory_mib[at]


def quantiles_ms(gaps_s: np.ndarray) -> tuple[float, float]:
    """(p50, p99) in milliseconds; nan if there are no gaps."""
    if not len(gaps_s):
        return float("nan"), float("nan")
    return tuple(float(round(1e3 * one, 3)) for one in np.quantile(gaps_s, (0.5, 0.99)))  # pyright: ignore[reportReturnType]


def finite(row: dict[str, Any]) -> dict[str, Any]:
    """The row with None instead of nan, which JSON does not have."""
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in row.items()}


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def server(fronts: int, engine: Sequence[str], start_s: float) -> Iterator[Processes]:
    """Start a server with so many fronts, and with `engine` as the command of its engine process; end it on exit.

    Raises:
        OSError: it does not start within `start_s` seconds.
    """
    spec = json.dumps({"fronts": fronts, "engine": [sys.executable, *engine]})
    command = [sys.executable, "-m", "tilewright.bench.front_server", spec]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            said, end_s = "", time.monotonic() + start_s
            while (found := re.search(r"http://127\.0\.0\.1:(\d+)", said)) is None:
                line = process.stderr.readline()
                said += line
                if not line or time.monotonic() > end_s:
                    raise OSError(f"the server did not start: {said.strip()}")
            pids = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
            commands = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in pids}
            serving = tuple(pid for pid in pids if "tilewright.server.front\0" in commands[pid])
            yield Processes(int(found[1]), serving, next(pid for pid in pids if pid not in serving))
        finally:
            process.terminate()


def clients(processes: Processes, shares: Sequence[Sequence[bytes]], idle: int = 0) -> Found:
    """Run one client for each share of request bodies, with `idle` further idle connections, and return their results.

    Raises:
        OSError: a stream ends early.
    """
    module = [sys.executable, "-m", "tilewright.bench.front_client", str(processes.port)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    memory: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        silent = subprocess.Popen([*module, "idle", str(idle)], **pipes)
        assert silent.stdout is not None
        if silent.stdout.readline() != "open\n":
            raise OSError(f"{idle} idle connections could not be opened")
        running: list[subprocess.Popen[str]] = []
        for i, bodies in enumerate(shares):
            Path(folder, f"{i}.txt").write_bytes(b"\n".join(bodies))
            running.append(subprocess.Popen([*module, f"{folder}/{i}.txt", f"{folder}/{i}.npy"], **pipes))
        while any(one.poll() is None for one in running):
            memory.append(processes.memory_mib())
            time.sleep(LOOK_S)
        said = [json.loads(one.communicate()[0] or "{}") for one in running]
        answered = int(silent.communicate("end\n")[0] or 0)
        wanted = sum(map(len, shares))
        if sum(one.get("whole", 0) for one in said) != wanted:
            whole = int(sum(one.get("whole", 0) for one in said))
            raise OSError(f"{wanted} streams were opened, but only {whole} ended normally")
        pairs = np.concatenate([np.load(Path(folder, f"{i}.npy")) for i in range(len(shares))])
    open_all = (pairs[:, 0] > max(one["begun_s"] for one in said)) & (pairs[:, 0] < min(one["ending_s"] for one in said))
    return Found(said, pairs[open_all, 1], memory, idle - answered)


def _serve(spec: dict[str, Any]) -> int:
    more_files()
    config = ServerConfig(
        port=0, fronts=spec["fronts"], max_connections=65536, log_level="error", max_wait_s=1e6, head_timeout_s=3600.0
    )
    with Log("error") as log, private_folder() as folder:
        return Supervisor(config, spec["engine"], folder, bind(config), log).run("measured")


if __name__ == "__main__":
    sys.exit(_serve(json.loads(sys.argv[1])))
