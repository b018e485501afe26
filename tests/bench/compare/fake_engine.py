"""A closed engine whose layers' times are known: a program behind `cmd:` that waits instead of being fast or slow.

    python fake_engine.py SPEED [FUSED]

A layer takes what `seconds_of` says of its kind and its weight's shape, over SPEED; a call costs `OVERHEAD`, inputs and outputs
`BORDER` seconds a byte. With FUSED, two weights' shapes ("64x64+8x64"), a product of the first and one of the second right
behind it (whatever elementwise stands between) take `FUSED_SHARE` of their sum, as in an engine that fuses them. Runs are
disturbed by noise and a wandering clock. Outputs are the model's own. Its counters are its true times.
"""

import hashlib
import json
import math
import random
import sys
import time
import zipfile
from typing import Any

OVERHEAD, BORDER, FUSED_SHARE = 1.5e-5, 2e-9, 0.6
KINDS = ("linear", "layer_norm", "conv2d")


def seconds_of(kind: str, shape: tuple[int, ...]) -> float:
    """Of a layer at speed 1: 20 to 100 microseconds, by no rule that a cost model would know."""
    number = int.from_bytes(hashlib.sha256(f"{kind} {shape}".encode()).digest()[:4], "big") / 2**32
    return 2e-5 * 5**number


def counters_of_program(
    anchors: list[tuple[str, tuple[int, ...]]], names: list[str], speed: float, fused: str
) -> list[dict[str, Any]]:
    """Of each anchor, called as the value that it makes; of two that are fused together, called as both."""
    found, behind = [], False
    for i, (kind, shape) in enumerate(anchors):
        seconds, name = seconds_of(kind, shape), names[i]
        if behind:
            behind = False
            continue
        if fused_pair(anchors, i, fused):
            seconds, name = FUSED_SHARE * (seconds + seconds_of(*anchors[i + 1])), f"{name} + {names[i + 1]}"
            behind = True
        found.append({"name": name, "kind": kind, "seconds": seconds / speed})
    return found


def fused_pair(anchors: list[tuple[str, tuple[int, ...]]], i: int, fused: str) -> bool:
    """Whether an anchor is computed together with the next one."""
    if i + 1 == len(anchors) or {anchors[i][0], anchors[i + 1][0]} != {"linear"}:
        return False
    return fused == "+".join(f"{rows}x{columns}" for _, (rows, columns) in anchors[i : i + 2])


def seconds_of_program(anchors: list[tuple[str, tuple[int, ...]]], border_bytes: int, speed: float, fused: str) -> float:
    """Of a call: `anchors` in order, each with its weight's shape."""
    total, saved = 0.0, 0.0
    for i, (kind, shape) in enumerate(anchors):
        total += seconds_of(kind, shape)
        if fused_pair(anchors, i, fused):
            saved += (1 - FUSED_SHARE) * (seconds_of(kind, shape) + seconds_of(*anchors[i + 1]))
    return (total - saved) / speed + OVERHEAD + BORDER * border_bytes


class Program:
    """One build. The archive is read without torch, which is imported when somebody asks for outputs: it takes seconds."""

    def __init__(self, model: str, inputs: str, speed: float, fused: str):
        self.model, self.inputs = model, inputs
        with zipfile.ZipFile(model) as archive:
            (name,) = [n for n in archive.namelist() if n.endswith("models/model.json")]
            graph = json.loads(archive.read(name))["graph_module"]["graph"]
        sizes = {name: [d["as_int"] for d in x["sizes"]] for name, x in graph["tensor_values"].items()}
        anchors, names, border = [], [], 0
        for node in graph["nodes"]:
            kind = node["target"].removeprefix("torch.ops.aten.").split(".")[0]
            given = {x["name"]: x["arg"].get("as_tensor", {}).get("name") for x in node["inputs"]}
            if kind in KINDS:
                anchors.append((kind, tuple(sizes[given["weight"]])))
                names += _names(node["outputs"][0])
        weights = {
            x for node in graph["nodes"] for i in node["inputs"] if i["name"] in ("weight", "bias") for x in _names(i["arg"])
        }
        for end in (*graph["inputs"], *graph["outputs"]):
            border += sum(4 * math.prod(sizes[x]) for x in _names(end) if x not in weights)
        self.seconds = seconds_of_program(anchors, border, speed, fused)
        self.counters = counters_of_program(anchors, names, speed, fused)

    def write_outputs(self, path: str) -> None:
        import numpy as np
        import torch

        with np.load(self.inputs) as arrays:
            inputs = [torch.from_numpy(arrays[f"input_{i}"]) for i in range(len(arrays.files))]
        with torch.no_grad():
            answer = torch.utils._pytree.tree_leaves(torch.export.load(self.model).module()(*inputs))
        np.savez(path, **{f"output_{i}": x.numpy() for i, x in enumerate(answer)})


def _names(argument: dict[str, Any]) -> list[str]:
    return [argument["as_tensor"]["name"]] if "as_tensor" in argument else []


def main(speed: float, fused: str) -> None:
    random.seed(1)
    programs: dict[str, Program] = {}
    started = time.monotonic()
    for line in sys.stdin:
        request = json.loads(line)
        said: dict[str, Any] = {"ok": True}
        if request["do"] == "hello":
            said |= {"protocol": 1, "model": "exported", "facts": {"precision": "fp32", "counters": True}}
        elif request["do"] == "build":
            programs[request["id"]] = Program(request["model"], request["inputs"], speed, fused)
        elif request["do"] == "run":
            began = time.perf_counter()
            clock = 1 + 0.03 * math.sin(5 * (time.monotonic() - started))
            noise = math.exp(random.gauss(0, 0.03)) * (1.5 if random.random() < 0.03 else 1.0)
            seconds = request["repeats"] * programs[request["id"]].seconds * clock * noise
            time.sleep(seconds)
            while time.perf_counter() - began < seconds:
                pass
            said["seconds"] = seconds
        elif request["do"] == "outputs":
            programs[request["id"]].write_outputs(request["path"])
        elif request["do"] == "counters":
            said["counters"] = programs[request["id"]].counters
        else:
            del programs[request["id"]]
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "")
