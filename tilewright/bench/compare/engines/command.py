"""Runs any program as an engine: JSON lines over its standard input and output, tensors in .npz files. Protocol 1.

A request is one line, its answer is one line: {"ok": true, ...} or {"ok": false, "error": "one sentence"}. Requests come one at
a time, in this order; `id` names a build, several are alive at once:

    {"do": "hello", "protocol": 1, "threads": 2, "device": "cpu"}
        -> {"ok": true, "protocol": 1, "model": "onnx" | "exported", "facts": {"engine": "...", "version": "...", ...}}
    {"do": "build", "id": "3", "model": "/a/path/3.onnx", "inputs": "/a/path/3.inputs.npz"}
        -> {"ok": true, "facts": {...}}          ready to run: what is slow at first has been done
    {"do": "run", "id": "3", "repeats": 20}
        -> {"ok": true, "seconds": 0.0123}       of all 20 forward passes together, each waited for
    {"do": "outputs", "id": "3", "path": "/a/path/3.outputs.npz"}
        -> {"ok": true}                          written there: output_0, output_1 ... of the example inputs
    {"do": "close", "id": "3"}
        -> {"ok": true}

Only if the facts of hello have "counters": true, and never while anything is timed:

    {"do": "counters", "id": "3"}
        -> {"ok": true, "counters": [{"name": "conv_7 + relu_3", "kind": "Convolution", "seconds": 1.2e-5}, ...]}
                                                 of one forward pass, as the program's own profiler has it

The arrays of `inputs` are input_0, input_1 ... in the order of the model's inputs. `model` is an ONNX file or, where hello
asked for "exported", a torch.export archive (torch.export.load). The end of its input tells the program to go; what it writes
to standard error is shown when it fails.

Nothing that a program says is trusted: lines, files and arrays have a largest size, arrays are read without pickle, every step
has a time limit, seconds that are no positive number, or more than passed on our clock, are an error. No shell is involved: the
command is split as a shell splits words, and run as it is, in a process group of its own which is ended with it.
"""

import json
import math
import os
import selectors
import shlex
import signal
import subprocess
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tilewright.bench.compare.engine import EngineError, Operation, Settings
from tilewright.bench.compare.engines.onnx_cut import OnnxParts
from tilewright.bench.compare.engines.onnx_export import export_onnx, input_arrays
from tilewright.bench.compare.engines.operations import exported_operations
from tilewright.bench.compare.results import Counter
from tilewright.bench.compare.variants import Variant

__all__ = ["PROTOCOL", "Command"]

PROTOCOL = 1
_MOST_LINE_BYTES = 1 << 20
_MOST_KEPT_ERRORS = 4096
_MOST_OUTPUT_BYTES = 4 << 30
_MOST_OUTPUTS = 1024
_HELLO_LIMIT_S = 60.0
_END_LIMIT_S = 5.0


class Command:
    """A running program."""

    def __init__(self, command: str, settings: Settings):
        self._settings = settings
        self._name = f"cmd:{command}"
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise EngineError(f"the command {command!r} cannot be split into words: {error}") from None
        if not words:
            raise EngineError("engine cmd: has no command; wanted cmd:./program and its arguments")
        self._folder = tempfile.TemporaryDirectory(prefix="tilewright-compare-")
        self._errors = b""
        self._pending = b""
        self._builds = 0
        self._parts = OnnxParts()
        self._asked = False  # and not answered: it does not listen, so it is not waited for
        try:
            self._process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, start_new_session=True
            )
        except OSError as error:
            self._folder.cleanup()
            raise EngineError(f"engine {self._name} did not start: {error}") from None
        try:
            self.facts = self._greet()
        except BaseException:
            self.close()
            raise

    def _greet(self) -> dict[str, Any]:
        hello = {"do": "hello", "protocol": PROTOCOL, "threads": self._settings.threads, "device": str(self._settings.device)}
        answer = self.ask(hello, _HELLO_LIMIT_S)
        if answer.get("protocol") != PROTOCOL:
            raise EngineError(f"engine {self._name} uses protocol {answer.get('protocol')!r}, wanted {PROTOCOL}")
        self._format = answer.get("model", "onnx")
        if self._format not in ("onnx", "exported"):
            raise EngineError(
                f"engine {self._name} requests models in the format {self._format!r}, wanted 'onnx' or 'exported'"
            )
        return {"clock": "the program's own, checked against ours", **_facts(answer, self._name)}

    def build(self, module: nn.Module, inputs: tuple[Tensor, ...], name: str) -> "_Built":
        def write(path: Path) -> list[Operation]:
            if self._format == "onnx":
                return export_onnx(module, inputs, path, name)
            program = torch.export.export(module, inputs)
            torch.export.save(program, path)
            return exported_operations(program)

        return self._built(write, inputs, name)

    def build_variant(self, variant: Variant) -> "_Built":
        """Of ONNX a part of the model's one exported graph."""
        if self._format != "onnx":
            return self.build(variant.module, variant.inputs, variant.name)
        return self._built(lambda path: self._parts.save(variant, path), variant.inputs, variant.name)

    def _built(self, write: Callable[[Path], Sequence[Operation] | None], inputs: tuple[Tensor, ...], name: str) -> "_Built":
        self._builds += 1
        key, folder = str(self._builds), Path(self._folder.name)
        model, arrays = folder / f"{key}.{'onnx' if self._format == 'onnx' else 'pt2'}", folder / f"{key}.inputs.npz"
        began = time.perf_counter()
        operations = write(model)
        np.savez(arrays, **input_arrays(inputs))  # pyright: ignore[reportArgumentType]
        exported = time.perf_counter() - began
        request = {"do": "build", "id": key, "model": str(model), "inputs": str(arrays)}
        answer = self.ask(request, self._settings.build_limit_s, f"building {name}")
        facts = {"export_s": exported, "build_s": time.perf_counter() - began, **_facts(answer, self._name)}
        built = _Built(self, key, folder / f"{key}.outputs.npz", facts, self._settings.run_limit_s, name)
        built.operations = operations or ()
        return built

    def close(self) -> None:
        assert self._process.stdin
        assert self._process.stdout
        assert self._process.stderr
        try:
            self._process.stdin.close()
            self._process.wait(0 if self._asked else _END_LIMIT_S)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            pass  # what does not go is ended below
        # The group, not the process: what it started goes with it, also after its own end.
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
            except ProcessLookupError:
                break
            try:
                self._process.wait(1)
            except subprocess.TimeoutExpired:
                continue
        self._process.wait()
        self._process.stdout.close()
        self._process.stderr.close()
        self._folder.cleanup()

    # ---- a request and its answer

    @property
    def owes(self) -> bool:
        """Whether it hangs, is gone or talks nonsense: the last request has no answer, and no further one would get one."""
        return self._asked

    def ask(self, request: dict[str, Any], limit_s: float, what: str = "") -> dict[str, Any]:
        """Send a request, wait for its answer. EngineError: it says no, says no JSON, says too much, hangs or is gone."""
        assert self._process.stdin
        what = what or str(request["do"])
        self._asked = True
        try:
            self._process.stdin.write((json.dumps(request) + "\n").encode())
            line = self._line(time.monotonic() + limit_s, limit_s, what)
        except BrokenPipeError:
            raise self._gone(what) from None
        try:
            answer = json.loads(line)
        except ValueError:
            raise EngineError(f"engine {self._name}, {what}: answered {line[:200]!r}, wanted one line of JSON") from None
        if not isinstance(answer, dict) or not isinstance(answer.get("ok"), bool):
            raise EngineError(f'engine {self._name}, {what}: answered {line[:200]!r}, wanted an object with "ok"')
        self._asked = False
        if not answer["ok"]:
            raise EngineError(
                f"engine {self._name}, {what}: {str(answer.get('error', 'no reason given'))[:2000]}{self._said()}"
            )
        return answer

    def _line(self, until: float, limit_s: float, what: str) -> str:
        assert self._process.stdout
        assert self._process.stderr
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._process.stdout, selectors.EVENT_READ)
            waiting.register(self._process.stderr, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                left = until - time.monotonic()
                ready = waiting.select(left) if left > 0 else []
                if not ready:
                    raise EngineError(f"engine {self._name}, {what}: there was no answer within {limit_s:g} s{self._said()}")
                for key, _ in ready:
                    got = os.read(key.fd, 1 << 16)
                    if key.fd == self._process.stderr.fileno():
                        self._errors = (self._errors + got)[-_MOST_KEPT_ERRORS:]
                        if not got:
                            waiting.unregister(key.fileobj)
                    elif got:
                        self._pending += got
                    else:
                        raise self._gone(what)
                if len(self._pending) > _MOST_LINE_BYTES:
                    raise EngineError(
                        f"engine {self._name}, {what}: the answer has a line of more than {_MOST_LINE_BYTES} bytes"
                    )
        line, _, self._pending = self._pending.partition(b"\n")
        return line.decode(errors="replace")

    def _gone(self, what: str) -> EngineError:
        """The program ended, or closed its output, which is the same."""
        assert self._process.stderr
        try:
            code = self._process.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            return EngineError(f"engine {self._name}, {what}: it closed its output but continues to run{self._said()}")
        os.set_blocking(self._process.stderr.fileno(), False)
        self._errors = (self._errors + (self._process.stderr.read(1 << 20) or b""))[-_MOST_KEPT_ERRORS:]
        how = f"with code {code}" if code >= 0 else f"by signal {signal.Signals(-code).name}"
        return EngineError(f"engine {self._name}, {what}: it ended {how}{self._said()}")

    def _said(self) -> str:
        text = self._errors.decode(errors="replace").strip()
        return f"; the end of its error output: {text[-1000:]}" if text else ""


class _Built:
    """A build inside the program."""

    def __init__(self, command: Command, key: str, path: Path, facts: dict[str, Any], limit_s: float, name: str):
        self._command, self._key, self._path, self._limit_s, self._name = command, key, path, limit_s, name
        self.facts = facts
        self.operations: Sequence[Operation] = ()

    def counters(self) -> list[Counter]:
        if self._command.facts.get("counters") is not True:
            raise EngineError(
                f'{self._command._name} has no counters, because the facts in its hello do not contain "counters": true'
            )
        what = f"counters of {self._name}"
        return _counters(
            self._command.ask({"do": "counters", "id": self._key}, self._limit_s, what), f"{self._command._name}, {what}"
        )

    def time(self, calls: int) -> float:
        began = time.perf_counter()
        request = {"do": "run", "id": self._key, "repeats": calls}
        seconds = self._command.ask(request, self._limit_s, f"running {self._name}").get("seconds")
        passed = time.perf_counter() - began
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not math.isfinite(seconds) or seconds <= 0:
            raise EngineError(
                f"{self._command._name}, {self._name}: reports that {calls} calls took {seconds!r}, wanted a number "
                "of seconds above 0"
            )
        if seconds > passed:
            raise EngineError(
                f"{self._command._name}, {self._name}: reports that {calls} calls took {seconds:.6g} s, but only "
                f"{passed:.6g} s passed here"
            )
        return float(seconds)

    def outputs(self) -> list[Tensor]:
        what = f"outputs of {self._name}"
        self._command.ask({"do": "outputs", "id": self._key, "path": str(self._path)}, self._limit_s, what)
        return _read_outputs(self._path, f"{self._command._name}, {what}")

    def close(self) -> None:
        if not self._command.owes:
            self._command.ask({"do": "close", "id": self._key}, self._limit_s)


def _facts(answer: dict[str, Any], name: str) -> dict[str, Any]:
    facts = answer.get("facts", {})
    if not isinstance(facts, dict):
        raise EngineError(f"engine {name}: its facts are {str(facts)[:200]!r}, wanted an object")
    return facts


def _counters(answer: dict[str, Any], what: str) -> list[Counter]:
    """Of an answer that nobody vouches for; how many and how large, `tilewright.bench.compare.counters` looks at."""
    rows = answer.get("counters")
    if not isinstance(rows, list):
        raise EngineError(f"{what}: {str(rows)[:200]}, wanted a list")
    found = []
    for row in rows:
        name, kind, seconds = (
            (row.get("name"), row.get("kind", ""), row.get("seconds")) if isinstance(row, dict) else (row, 0, 0)
        )
        if (
            not isinstance(name, str)
            or not isinstance(kind, str)
            or not isinstance(seconds, int | float)
            or isinstance(seconds, bool)
        ):
            raise EngineError(f"{what}: one is {str(row)[:200]}, wanted an object with name, kind and seconds")
        found.append(Counter(name=name, kind=kind, seconds=_float(seconds)))
    return found


def _float(number: int | float) -> float:
    """JSON has whole numbers of any length."""
    try:
        return float(number)
    except OverflowError:
        return math.inf


def _read_outputs(path: Path, what: str) -> list[Tensor]:
    """output_0, output_1 ... of a file that nobody vouches for."""
    try:
        with zipfile.ZipFile(path) as archive:
            sizes = [info.file_size for info in archive.infolist()]
        if sum(sizes) > _MOST_OUTPUT_BYTES or len(sizes) > _MOST_OUTPUTS:
            raise EngineError(
                f"{what}: {len(sizes)} arrays of {sum(sizes)} bytes; at most {_MOST_OUTPUTS} of {_MOST_OUTPUT_BYTES}"
            )
        with np.load(path) as arrays:
            names = [f"output_{i}" for i in range(len(arrays.files))]
            if sorted(arrays.files) != sorted(names):
                raise EngineError(
                    f"{what}: the file has {', '.join(arrays.files)[:500] or 'nothing'}, wanted output_0, output_1 ..."
                )
            found = [torch.from_numpy(np.ascontiguousarray(arrays[name])) for name in names]
    except EngineError:
        raise
    except (OSError, ValueError, TypeError, zipfile.BadZipFile) as error:
        raise EngineError(f"{what}: {error}") from None
    return [x.double() if x.is_floating_point() else x for x in found]
