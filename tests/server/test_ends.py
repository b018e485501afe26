"""How a server process ends, and what it does where steps hang, descriptors run out, or nobody reads its log."""

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest

from tests.awake import until
from tests.server import fake_engine
from tests.server.test_lifecycle import END_S
from tests.server.test_surroundings import answer, connect, generation
from tests.server.tiny_model import write_tiny_model
from tests.server.victim import ALPHABET, ALPHABET_TEXT, ServerProcess, Victim, server_process, victim
from tilewright.server.connections import LOOK_AGAIN_S


@pytest.mark.usefixtures("long_shape")
def test_a_client_that_does_not_read_does_not_hold_the_end() -> None:
    with server_process("tests.server.fake_server", "0.001", "drain_timeout_s=1.0") as server:
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        with one:
            one.connect(("127.0.0.1", server.port))
            one.sendall(generation(n=32, logprobs=5, max_tokens=4000))
            until(lambda: server.metric("tilewright_requests_running") > 0)
            time.sleep(1)  # what the kernel holds is full
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(END_S) == 143


@pytest.mark.usefixtures("long_shape")
def test_requests_that_take_too_long_are_aborted_with_words() -> None:
    with server_process("tests.server.fake_server", "0.05", "drain_timeout_s=0.5") as server:
        one = Victim(server.port, ALPHABET, ALPHABET_TEXT)
        one.start()
        assert one.started.wait(60)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: b'"draining": true' in server.request("GET", "/live")[2])
        one.join(60)
        assert "did not finish in time" in one.ended
        assert server.process.wait(END_S) == 143


@pytest.mark.usefixtures("long_shape")
def test_a_step_that_hangs_is_noticed_and_does_not_hold_the_end() -> None:
    with server_process("tests.server.fake_server", "0", "hangs", "step_timeout_s=0.5", "drain_timeout_s=0.5") as server:
        assert server.request("GET", "/health")[0] == 200
        with connect(server) as one:
            one.sendall(generation())
            fronts = 1 if fake_engine.shape_now == "thread" else 2  # each notices it, and any may answer
            until(lambda: sum("has been running for more than 0.5 s" in line for line in server.lines) == fronts, 30)
            assert server.request("GET", "/health")[0] == 503
            assert json.loads(server.request("GET", "/ready")[2]) == {"status": "hanging"}
            assert json.loads(server.post(prompt="x")[2])["error"]["code"] == "hanging"
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(END_S) == 143


def test_streams_go_on_when_the_reader_of_the_log_has_gone() -> None:
    command = [sys.executable, "-m", "tests.server.fake_server", "0.01", "log_level='info'"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        found = re.search(r"127\.0\.0\.1:(\d+)", process.stderr.readline())
        assert found
        one = Victim(int(found[1]), {**ALPHABET, "max_tokens": 150}, ALPHABET_TEXT)
        one.start()
        assert one.started.wait(60)
        process.stderr.close()
        process.send_signal(signal.SIGTERM)
        one.join(60)
        assert (one.ended, one.text) == ("data: [DONE]\n", ALPHABET_TEXT[:150])
        assert process.wait(END_S) == 0


def test_a_log_that_nobody_reads_holds_nobody_up() -> None:
    """The reader sleeps: the pipe is full after 64 KiB."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.server.fake_server", "0", "log_level='info'"], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        found = re.search(r"127\.0\.0\.1:(\d+)", process.stderr.readline())
        assert found
        server = ServerProcess(process, int(found[1]))
        with connect(server) as one:
            last = b"GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
            one.sendall(b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n" * 1500 + last)
            assert answer(one).count(b"HTTP/1.1 200") == 1501
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_S) == 0


EVICTED = 'tilewright_http_connections_ended_total{reason="evicted"}'


def test_out_of_files_is_a_pause_and_a_line() -> None:
    with server_process("tests.server.fake_server", "0.005") as server:
        pid = server.process.pid
        with victim(server.port, ALPHABET, ALPHABET_TEXT), ExitStack() as stack:
            limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (len(os.listdir(f"/proc/{pid}/fd")) + 10, limits[1]))
            for _ in range(200):
                stack.enter_context(connect(server))  # the kernel takes them all
            before_s = server.cpu_s()
            time.sleep(2)
            assert server.cpu_s() - before_s < 1.2, "one core does not spin"
            assert server.post(prompt="ab", max_tokens=3)[0] == 200
            resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
            time.sleep(2 * LOOK_AGAIN_S)
            evicted = server.metric(EVICTED)
            for _ in range(50):
                stack.enter_context(connect(server))
            assert server.metric("tilewright_http_connections") > 50, "the cap is back where it was"
            assert server.metric(EVICTED) == evicted
        said = [line for line in server.lines if "no new connections for a second" in line]
        assert len(said) == 1
        assert sum(map(len, server.lines)) < 10_000


def test_fewer_files_than_connections_is_said() -> None:
    script = (
        "import resource, runpy, sys\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[1])))\n"
        "sys.argv = ['fake_server', '0']\n"
        "runpy.run_module('tests.server.fake_server', run_name='__main__')\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, "120"], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert re.match(r"warning: only \d\d connections at a time, .* --max-connections is 4096", process.stderr.readline())
        process.kill()
    done = subprocess.run([sys.executable, "-c", script, "40"], capture_output=True, text=True, timeout=60)
    assert "this process may open only 40 files, but needs" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("redirection", ["2>/dev/full", "2>&- >&- <&-"])
def test_a_start_without_anybody_to_tell(redirection: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    command = f"exec {sys.executable} -m tilewright.cli serve {folder} --device cpu --max-seqs 4 --port {port} {redirection}"
    with subprocess.Popen(command, shell=True) as process:
        server = ServerProcess(process, port)

        def ready() -> bool:
            assert process.poll() is None
            try:
                return server.request("GET", "/ready")[0] == 200
            except ConnectionRefusedError:
                return False

        try:
            until(ready, 60)
            assert server.post(prompt="ab", max_tokens=3, ignore_eos=True)[0] == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(END_S) == 0
        finally:
            if process.poll() is None:
                process.kill()


@pytest.mark.long
def test_everything_at_once() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.server.storm"], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
