"""A complete engine for `tilewright compare --baseline "cmd:python examples/onnxruntime_engine.py"`: ONNX Runtime, on the CPU.

Requests and answers are lines of JSON (docs/compare.md has them all); nothing else may be written to standard output.
"""

import json
import statistics
import sys
import time

import numpy as np
import onnxruntime

built = {}  # id -> (session, arrays by the names of its inputs, path of the model)
threads = 1


def hello(request):
    global threads
    threads = request["threads"]
    facts = {"versions": {"onnxruntime": onnxruntime.__version__}, "device": "cpu", "threads": threads}
    facts |= {
        "precision": "fp32",
        "graph": False,
        "copies": "out: results are new arrays",
        "clock": "wall clock",
        "counters": True,
    }
    return {"protocol": 1, "model": "onnx", "facts": facts}


def started(model, profile):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.enable_profiling, options.profile_file_prefix = profile, f"{model}.profile"
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def build(request):
    session = started(request["model"], profile=False)
    with np.load(request["inputs"]) as arrays:
        given = {node.name: arrays[node.name] for node in session.get_inputs()}
    built[request["id"]] = session, given, request["model"]
    return {"facts": {"inputs": [f"{x.dtype}[{','.join(map(str, x.shape))}]" for x in given.values()]}}


def run(request):
    session, arrays, _ = built[request["id"]]
    began = time.perf_counter()
    for _ in range(request["repeats"]):
        session.run(None, arrays)
    return {"seconds": time.perf_counter() - began}


def outputs(request):
    session, arrays, _ = built[request["id"]]
    np.savez(request["path"], **{f"output_{i}": x for i, x in enumerate(session.run(None, arrays))})
    return {}


def counters(request):
    """What its profiler says of each node: may be left out, with "counters" in the facts of hello."""
    _, arrays, model = built[request["id"]]
    session, found = started(model, profile=True), {}
    for _ in range(20):
        session.run(None, arrays)
    with open(session.end_profiling()) as file:  # beside the model: it goes with it
        for event in json.load(file):
            if event["cat"] == "Node" and event["name"].endswith("_kernel_time"):
                key = event["name"].removesuffix("_kernel_time").removesuffix("_nchwc"), event["args"]["op_name"]
                found.setdefault(key, []).append(event["dur"] * 1e-6)
    return {"counters": [{"name": n, "kind": k, "seconds": statistics.median(s)} for (n, k), s in found.items()]}


def close(request):
    del built[request["id"]]
    return {}


STEPS = {step.__name__: step for step in (hello, build, run, outputs, counters, close)}
for line in sys.stdin:
    request = json.loads(line)
    try:
        answer = {"ok": True, **STEPS[request["do"]](request)}
    except (KeyError, RuntimeError, ValueError) as error:  # anything else ends this program, which is told with its last words
        answer = {"ok": False, "error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer), flush=True)
