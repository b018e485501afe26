"""What `tilewright serve` warns of before it serves, without a socket that anybody could reach."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from tests.server.tiny_model import write_tiny_model
from tilewright.cli import serve as verb
from tilewright.host.config import HostConfig
from tilewright.server import serve
from tilewright.server.config import ServerConfig
from tilewright.server.logs import Log


class Lines(Log):
    """A log that keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        """Keep it."""
        self.lines.append(line)


@pytest.fixture
def warnings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """The warnings of a start with these options."""
    monkeypatch.setattr(serve, "run_server", lambda app, listener, log: listener.close() or 0)

    def start(*, host: str = "127.0.0.1", api_key: str | None = None, added: int = 0, **engine: Any) -> list[str]:
        folder = write_tiny_model(tmp_path / "tiny")
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.add_tokens([f"<added{number}>" for number in range(added)])
        tokenizer.save(str(folder / "tokenizer.json"))
        log = Lines()
        options = {"device": "cpu", "max_seqs": 2, **engine}
        config = ServerConfig(host=host, port=0, api_key=api_key, fronts=0)
        assert verb._serve(str(folder), None, options, config, log, [], HostConfig()) == 0
        return [line for text in log.lines for line in text.splitlines() if line.startswith("warning: ")]

    return start


def test_a_usual_start_warns_of_nothing(warnings: Callable[..., list[str]]) -> None:
    assert warnings() == []


def test_everybody_may_come(warnings: Callable[..., list[str]]) -> None:
    (words,) = warnings(host="0.0.0.0")
    assert "everybody who can reach 0.0.0.0 can use this server, because it has no API key" in words
    assert warnings(host="0.0.0.0", api_key="k") == []


def test_a_tokenizer_of_another_model(warnings: Callable[..., list[str]]) -> None:
    (words,) = warnings(added=3)
    assert "the tokenizer has 261 tokens and the model 258" in words


def test_a_cache_that_was_cut(warnings: Callable[..., list[str]]) -> None:
    (words,) = warnings(kv_cache_bytes=1 << 30)
    assert "kv_cache_bytes is 1,073,741,824, but 2 requests (max_seqs) of 128 tokens need no more than" in words


def test_contexts_that_were_cut(warnings: Callable[..., list[str]]) -> None:
    (words,) = warnings(kv_cache_bytes=20_000)
    assert "contexts are cut to 64 tokens, what the KV cache holds; the model could take 128" in words


def test_a_line_that_does_not_fit_its_arguments_is_still_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    import logging

    with Log("info", "json") as log:
        logging.getLogger("tilewright.x").info("%d files", "many")
        logging.getLogger("tilewright.x").info("fine")
        logging.getLogger("somebody.else").info("not ours")
        log.say("Serving")
    first, *rest = capfd.readouterr().err.splitlines()
    assert "could not be written" in first
    assert [json.loads(line)["message"] for line in rest] == ["fine", "Serving"]


def test_lines_that_come_together_are_written_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each write wakes a thread that needs Python's lock: many lines cost few of them, and none is lost or out of order."""
    import logging
    import os

    written, write = list[int](), os.write

    def counted(descriptor: int, data: bytes) -> int:
        if descriptor == file.fileno():
            written.append(len(data))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", counted)
    with open(tmp_path / "log", "wb") as file, Log(descriptor=file.fileno()):
        for number in range(2000):
            logging.getLogger("tilewright.x").info("%d", number)
    lines = (tmp_path / "log").read_text().splitlines()
    assert [int(line.rpartition(" ")[2]) for line in lines] == list(range(2000))
    assert len(written) < 200


BUFFERS = """
import gc, resource, sys
from tilewright.server.memory import settle

def step():
    buffers = [bytearray(b"1") * (1 << 20) for _ in range(12)]
    del buffers

if sys.argv[1] == "settled":
    settle()
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_what_a_step_frees_the_next_has() -> None:
    """The system hands out no page anew: each costs a fault, and has to be cleared."""
    import platform
    import subprocess
    import sys

    if platform.libc_ver()[0] != "glibc":
        pytest.skip("another malloc than glibc's")
    faults = {
        how: int(subprocess.run([sys.executable, "-c", BUFFERS, how], capture_output=True, text=True, check=True).stdout)
        for how in ("settled", "as it is")
    }
    assert faults["settled"] < 200, faults
