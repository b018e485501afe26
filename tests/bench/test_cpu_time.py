"""Processor time of the processes of a server: which process is which, and what is said of two samples."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tests.awake import until
from tilewright.bench.cpu_time import served, share_of, watched

BUSY = "import sys\nprint(flush=True)\nwhile True: pass"

METRICS = """# HELP tilewright_model_shared_bytes_direct_total Bytes
tilewright_model_shared_bytes_direct_total{{model="m",version="1"}} {direct}.0
tilewright_model_shared_bytes_direct_total{{model="mm",version="1"}} 5.0
tilewright_model_shared_bytes_read_total{{model="m",version="1"}} {read}.0
tilewright_model_shared_bytes_read_created{{model="m",version="1"}} 1.7e+09
tilewright_model_shared_bytes_locked{{model="m",version="1"}} 4096.0
tilewright_model_shared_bytes_locked{{model="m",version="2"}} 512.0
"""


@pytest.fixture
def busy() -> Iterator["subprocess.Popen[bytes]"]:
    """A child of this process that is always busy."""
    command = [sys.executable, "-c", BUSY, "tilewright.host.nursery"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        yield process
        process.kill()


def test_processes_are_told_apart(busy: "subprocess.Popen[bytes]") -> None:
    found = served(os.getpid(), [])
    assert list(found["server"]) == [os.getpid()]
    assert busy.pid in found["model"]
    assert list(served(os.getppid(), [busy.pid])["clients"]) == [busy.pid]
    until(lambda: served(os.getpid(), [])["model"][busy.pid] >= found["model"][busy.pid] + 0.05)


def test_shares_are_of_rows_and_of_time() -> None:
    before = {"server": {1: 10.0}, "fronts": {2: 1.0, 3: 2.0}}
    after = {"server": {1: 10.5}, "fronts": {3: 2.25, 2: 1.5, 4: 0.25}}
    assert share_of(before, after, 2.0, 10_000) == {
        "server": {"us_per_row": 50.0, "cores": 0.25, "busiest": 0.25},
        "fronts": {"us_per_row": 100.0, "cores": 0.5, "busiest": 0.25},
    }


def test_a_server_is_watched_from_its_first_answer_on() -> None:
    asked = list[str]()

    class Stats(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/metrics":
                return self.say(METRICS.format(direct=300 * len(asked), read=100 * len(asked)).encode())
            asked.append(self.path)
            rows = 0 if len(asked) < 4 else 100 * len(asked)
            body = json.dumps({"model_stats": [{"inference_count": rows, "execution_count": rows // 50}]}).encode()
            self.say(body)

        def say(self, body: bytes) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Stats) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        found = watched(url, "m", os.getpid(), [], 0.2)
        assert found["rows_per_batch"] == 50
        assert 0 < found["rows_per_s"] <= 500
        assert (found["direct_share"], found["locked_bytes"]) == (0.75, 4096 + 512)
        assert found["cpu"]["server"]["us_per_row"] >= 0
        assert set(asked) == {"/v2/models/m/stats"}
        asked[:] = []
        assert watched(url, "m", os.getpid(), [], 0.2, wait_s=0.1) == {}
        server.shutdown()
