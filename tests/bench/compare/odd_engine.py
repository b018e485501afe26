"""A program that speaks the protocol of `cmd:` and goes wrong in one way, named by its argument; "well" goes wrong in none.

It computes nothing: outputs are zeros of the shape [2, 3], a run takes what it says. Without numpy, so that it starts at once.
"""

import io
import json
import os
import struct
import subprocess
import sys
import time
import zipfile

ODD = sys.argv[1]


def npy(header: str, data: bytes) -> bytes:
    padded = header.ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(padded)) + padded.encode() + data


def write_outputs(path: str) -> None:
    shape, data, kind = (2, 3), b"\0" * 24, "<f4"
    name = "output_0.npy"
    if ODD == "pickle":
        kind, data = "|O", b"cposix\nsystem\n(S'touch owned'\ntR."
    if ODD == "huge":
        data = b"\0" * (6 << 20)
    if ODD == "names":
        name = "result.npy"
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, npy(f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}", data))
    with open(path, "wb") as file:
        file.write(b"no archive" if ODD == "no archive" else buffer.getvalue())


COUNTERS = {
    "negative": [{"name": "a", "kind": "", "seconds": -1e-9}],
    "not a number": [{"name": "a", "kind": "", "seconds": float("nan")}],
    "endless": [{"name": "a", "kind": "", "seconds": 10**400}],
    "a word": [{"name": "a", "kind": "", "seconds": "soon"}],
    "yes": [{"name": "a", "kind": "", "seconds": True}],
    "nameless": [{"kind": "", "seconds": 0.0}],
    "a row": [["a", "", 0.0]],
    "an object": {"a": 0.0},
    "nothing": [],
    "too many": [{"name": "", "seconds": 0}] * 5000,
    "a million": [{"name": "a", "kind": "", "seconds": 0.0}] * 1_000_000,
    "a long name": [{"name": "a" * 1001, "kind": "", "seconds": 0.0}],
    "a long kind": [{"name": "a", "kind": "a" * 101, "seconds": 0.0}],
    "a strange name": [{"name": "a\ud800\n\u202eb", "seconds": 0}],
}
"""What "well" would tell is a counter of its one layer."""


def answer(request: dict) -> dict:
    do = request["do"]
    if do == "hello":
        facts = {"odd": ODD, "counters": 1 if ODD == "counters 1" else True}
        return {"protocol": 2 if ODD == "protocol" else 1, "model": "exported", "facts": [] if ODD == "facts" else facts}
    if do == "build":
        if ODD == "crash":
            sys.stderr.write("x" * 100_000 + "out of paper\n")
            os.abort()
        if ODD == "refuse":
            return {"ok": False, "error": "no such operator: paint"}
        if ODD == "child":
            child = subprocess.Popen(["sleep", "60"])
            return {"facts": {"child": child.pid}}
        return {"facts": {"build": 1}}
    if do == "run":
        time.sleep(0.002)
        odd = {"hang": 0.0, "liar": 3600.0, "backwards": -1.0, "nan": float("nan"), "text": "soon", "true": True}
        if ODD == "hang":
            time.sleep(60)
        return {"seconds": odd.get(ODD, 1e-3)}
    if do == "counters":
        if ODD == "hang":
            time.sleep(60)
        return {"counters": COUNTERS.get(ODD, [{"name": "linear", "kind": "gemm", "seconds": 1e-3}])}
    if do == "outputs":
        write_outputs(request["path"])
    return {}


for line in sys.stdin:
    found = {"ok": True, **answer(json.loads(line))}
    if ODD == "no json":
        print("hello!", flush=True)
    elif ODD == "long":
        sys.stdout.write("x" * (3 << 20))
        sys.stdout.flush()
    elif ODD == "no ok":
        print("[1]", flush=True)
    else:
        print(json.dumps(found), flush=True)
