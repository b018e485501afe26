"""Reads hardware counters of one call with NVIDIA Nsight Compute (`ncu`), if it is installed and the driver permits it.

`ncu` runs a Python process that calls the op once between two markers of the profiler; kernels outside of them are not counted.
Nothing is estimated: if a counter cannot be read, the result is the reason.
"""

import csv
import io
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["METRICS", "counters_of", "parse"]

METRICS = {
    "achieved occupancy %": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "tensor pipe %": "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
    "dram bytes": "dram__bytes.sum",
    "l2 hit %": "lts__t_sector_hit_rate.pct",
    "sectors a request": "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio",
    "shared bank conflicts": "l1tex__data_bank_conflicts_pipe_lsu.sum",
    "threads an instruction": "smsp__thread_inst_executed_per_inst_executed.ratio",
}
"""Our name of a metric -> the counter's name. The last metric is at most 32 and falls with divergence."""
_PLACES = ("/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute/ncu")
_TIMEOUT_S = 180
_CHILD = """
import sys, torch
from tilewright.bench.dims import find_op, parse_dims
from tilewright.op import Inputs, prefer
op = find_op(sys.argv[1])
args = op.make(Inputs("cuda", here=True), **parse_dims(op, sys.argv[3:]))
def run():
    if sys.argv[2]:
        with prefer(sys.argv[2]):
            op.run(*args)
    else:
        op.run(*args)
run()
torch.cuda.synchronize()
torch.cuda.cudart().cudaProfilerStart()
run()
torch.cuda.synchronize()
torch.cuda.cudart().cudaProfilerStop()
"""


def counters_of(op_name: str, words: Sequence[str], preferred: str | None) -> dict[str, Any] | str:
    """Kernel name -> {metric of METRICS: value}; if the counters cannot be read, a sentence that says why."""
    tool = shutil.which("ncu") or next((place for place in _PLACES if Path(place).is_file()), None)
    if tool is None:
        return "ncu is not installed; it is part of the CUDA toolkit and of Nsight Compute"
    command = [tool, "--csv", "--profile-from-start", "off", "--metrics", ",".join(METRICS.values())]
    command += [sys.executable, "-c", _CHILD, op_name, preferred or "", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"ncu did not end within {_TIMEOUT_S} s"
    text = done.stdout + done.stderr
    if "ERR_NVGPUCTRPERM" in text:
        return (
            "the driver lets only administrators read counters (ERR_NVGPUCTRPERM); run as root, or load the nvidia "
            "module with NVreg_RestrictProfilingToAdminUsers=0; in a container also --cap-add=SYS_ADMIN"
        )
    found = parse(done.stdout)
    if not found:
        last = [line for line in text.splitlines() if line.strip()][-1:] or ["no output"]
        return f"ncu reported no counters (exit code {done.returncode}): {last[0]}"
    return found


def parse(text: str) -> dict[str, dict[str, float]]:
    """Parse the output of `ncu --csv`: one line for each kernel and metric, among lines of other programs.

    The second launch of a kernel gets the name "KERNEL #2", and so on.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return {}
    ours = {name: short for short, name in METRICS.items()}
    found: dict[str, dict[str, float]] = {}
    labels: dict[str, str] = {}
    for row in csv.DictReader(io.StringIO("\n".join(lines[start:]))):
        name, launch = row.get("Metric Name"), row.get("ID")
        if name not in ours or launch is None:
            continue
        if launch not in labels:
            kernel = row["Kernel Name"].split("(")[0]
            same = sum(label.split(" #")[0] == kernel for label in labels.values())
            labels[launch] = f"{kernel} #{same + 1}" if same else kernel
        scale = {"Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}.get(row.get("Metric Unit", ""), 1.0)
        try:
            value = float(row["Metric Value"].replace(",", "")) * scale
        except ValueError:
            continue  # "n/a": this card has no such counter
        found.setdefault(labels[launch], {})[ours[name]] = value
    return found
