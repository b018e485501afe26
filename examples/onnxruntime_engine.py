"""A complete engine for `tilewright compare --baseline "cmd:python examples/onnxruntime_engine.py"`: ONNX Runtime, on the CPU.

Requests and answers are lines of JSON (docs/compare.md has them all); nothing else may be written to standard output.
"""

import json
import sys
import time

import numpy as np
import onnxruntime

built = {}  # id -> (session, arrays by the names of its inputs)
threads = 1


def hello(request):
    global threads
    threads = request["threads"]
    facts = {"versions": {"onnxruntime": onnxruntime.__version__}, "device": "cpu", "threads": threads}
    facts |= {"precision": "fp32", "graph": False, "copies": "out: results are new arrays", "clock": "wall clock"}
    return {"protocol": 1, "model": "onnx", "facts": facts}


def build(request):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(request["model"], options, providers=["CPUExecutionProvider"])
    with np.load(request["inputs"]) as arrays:
        built[request["id"]] = session, {node.name: arrays[node.name] for node in session.get_inputs()}
    return {"facts": {"inputs": [f"{x.dtype}[{','.join(map(str, x.shape))}]" for x in built[request["id"]][1].values()]}}


def run(request):
    session, arrays = built[request["id"]]
    began = time.perf_counter()
    for _ in range(request["repeats"]):
        session.run(None, arrays)
    return {"seconds": time.perf_counter() - began}


def outputs(request):
    session, arrays = built[request["id"]]
    np.savez(request["path"], **{f"output_{i}": x for i, x in enumerate(session.run(None, arrays))})
    return {}


def close(request):
    del built[request["id"]]
    return {}


STEPS = {step.__name__: step for step in (hello, build, run, outputs, close)}
for line in sys.stdin:
    request = json.loads(line)
    try:
        answer = {"ok": True, **STEPS[request["do"]](request)}
    except (KeyError, RuntimeError, ValueError) as error:  # anything else ends this program, which is told with its last words
        answer = {"ok": False, "error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer), flush=True)
