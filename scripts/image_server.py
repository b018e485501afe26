"""A server of images for measure_images.py and measure_fronts.py: its model, its process, and where results go."""

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["FIRST", "NAME", "Run", "end", "on_cores", "serving", "written"]

CODE = """
import os, sys, threading, time, traceback
import torch
from pathlib import Path
from tilewright.bench.compare.models import load_model
from tilewright.bench.served_rate import wait_to_be_asked

def say_where():
    main = threading.main_thread().ident
    while not os.path.exists({ready!r}):
        time.sleep(10)
        frames = traceback.extract_stack(sys._current_frames()[main])[::-1]
        ours = [f"{{os.path.basename(f.filename)}}:{{f.lineno}} {{f.name}}" for f in frames if "tilewright" in f.filename]
        print("loading:", frames[0].name, *ours[:12], sep=" < ", file=sys.stderr, flush=True)

class Bytes(torch.nn.Module):
    def __init__(self, net, dtype):
        super().__init__()
        self.net, self.dtype = net, dtype
    def forward(self, image):
        return self.net(image.to(self.dtype) / 255)

class First(torch.nn.Module):
    def forward(self, image):
        time.sleep({sleep_ms} / 1e3)
        return image.flatten(1)[:, :1000].contiguous()

def build():
    threading.Thread(target=say_where, daemon=True).start()
    net = First() if {model!r} == {first!r} else load_model({model!r}).module
    dtype = torch.float16 if {fp16!r} else torch.float32
    net = net.to(dtype)
    shape = (1, 3, {size}, {size})
    generator = torch.Generator().manual_seed(0)
    image = torch.rand(shape, generator=generator).to(dtype)
    if {uint8!r}:
        net, image = Bytes(net, dtype), torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    wait_to_be_asked(Path({folder!r}), image)
    return net, image
"""
NAME, FIRST = "images", "first"
READY = "ready"
"""File that ends what the model's process says of its loading."""


class Run:
    """What is asked, until when, and where results go."""

    def __init__(self, asked: argparse.Namespace):
        self.asked, self.end_s, self._began_s = asked, time.monotonic() + asked.total, time.monotonic()
        asked.out.mkdir(parents=True, exist_ok=True)
        self.results = asked.out / "results.jsonl"
        self.server = 0
        """The server's process number."""

    def left_s(self) -> float:
        """Seconds until everything has to have ended."""
        return self.end_s - time.monotonic()

    def say(self, text: str) -> None:
        """A line on the screen, with the time since the beginning."""
        print(f"[{time.monotonic() - self._began_s:6.1f} s] {text}", flush=True)

    def note(self, **result: Any) -> None:
        """A line of the results."""
        line = json.dumps({"at_s": round(time.monotonic() - self._began_s, 1), **result})
        with self.results.open("a") as file:
            file.write(line + "\n")
        self.say(line)


def on_cores(cores: str | None) -> list[str]:
    """The words before a command that has to stay on some cores."""
    return ["taskset", "-c", cores] if cores else []


def end(process: "subprocess.Popen[Any]", patience_s: float) -> None:
    """End a process and all that it began."""
    for number, wait_s in ((signal.SIGTERM, patience_s), (signal.SIGKILL, 5.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def written(asked: argparse.Namespace, folder: Path) -> dict[str, str]:
    """Write the model's code and its repository; the environment of processes that need them."""
    sizes, fp16 = [int(n) for n in asked.sizes.split(",")], asked.precision == "fp16"
    fields = {"model": asked.model, "first": FIRST, "fp16": fp16, "size": asked.size, "uint8": asked.input == "uint8"}
    fields |= {"sleep_ms": asked.sleep_ms}
    code = CODE.format(**fields, ready=str(folder / READY), folder=str(folder))
    (folder / "served_images.py").write_text(code)
    (folder / "models" / NAME / "1").mkdir(parents=True)
    options = {"source": "served_images:build", "device": asked.device, "max_batch": max(sizes), "max_wait_s": 30}
    options |= {"lock_regions": False} if asked.no_locks else {}
    options |= {} if asked.model == FIRST else {"precision": asked.precision, "preferred": sizes}
    text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in options.items())
    (folder / "models" / NAME / "model.toml").write_text("[model]\n" + text)
    root = str(Path(__file__).resolve().parents[1])
    paths = [str(folder), root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def free_port() -> int:
    """A port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]


@contextlib.contextmanager
def serving(run: Run, folder: Path, env: dict[str, str]) -> Iterator[str]:
    """The URL of a server that is ready; "" if it is not in time."""
    port, log = free_port(), run.asked.out / "server.log"
    words = [*on_cores(run.asked.server_cores), sys.executable, "-m", "tilewright.cli", "serve"]
    words += ["--repository", str(folder / "models"), "--package", "served_images", "--shared-memory", "--port", str(port)]
    words += ["--max-body-mib", "64", "--fronts", str(run.asked.fronts)]  # 64 images as bytes are 18 MiB
    with log.open("wb") as file:
        server = subprocess.Popen(words, cwd=folder, env=env, stdout=file, stderr=file, start_new_session=True)
    run.server = server.pid
    try:
        if wait_until_ready(run, server, f"http://127.0.0.1:{port}"):
            (folder / READY).touch()
            yield f"http://127.0.0.1:{port}"
        else:
            run.say("the server's log ends with\n" + "\n".join(log.read_text(errors="replace").splitlines()[-40:]))
            run.note(what="failed", why="the server is not ready in time, or ended", code=server.poll())
            yield ""
    finally:
        end(server, 10.0)


def wait_until_ready(run: Run, server: "subprocess.Popen[Any]", url: str) -> bool:
    """Whether the server takes requests before only the time without it is left."""
    began_s = said_s = time.monotonic()
    while server.poll() is None and run.left_s() > run.asked.offline_seconds + 10:
        try:
            with urllib.request.urlopen(f"{url}/v2/models/{NAME}/ready", timeout=2) as answer:
                if answer.status == 200:
                    run.note(what="ready", seconds=round(time.monotonic() - began_s, 1))
                    return True
            state = f"status {answer.status}"
        except urllib.error.HTTPError as error:
            state = f"status {error.code}"
        except OSError as error:
            state = str(error)
        if time.monotonic() - said_s >= 10:
            said_s = time.monotonic()
            lines = (run.asked.out / "server.log").read_text(errors="replace").splitlines()
            run.say(f"not ready ({state}); its log: {lines[-1][:200] if lines else 'empty'}")
        time.sleep(0.2)
    return False
