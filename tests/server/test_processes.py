"""A server of several processes, some of which are killed or stopped while streams are open."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from tests.awake import awake_s, until
from tests.server.test_lifecycle import END_S
from tests.server.test_surroundings import connect, generation
from tests.server.victim import ALPHABET, ALPHABET_TEXT, ServerProcess, Victim, server_process
from tilewright.server.config import ServerConfig
from tilewright.server.supervisor import private_folder, read_config, write_config

BACK_S = 60.0
"""A process is started again: its pause, and Python's own start on a busy machine."""


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with server_process("tests.server.fake_server", "0.005", "fronts=2", "drain_timeout_s=2.0") as server:
        yield server


def children(pid: int) -> dict[int, str]:
    """Child processes, with their commands."""
    found = dict[int, str]()
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended while they were listed
            found[int(child)] = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
    return found


def engine_of(server: ServerProcess) -> int:
    """Once there is one: it is being started again after a test that ended it."""
    until(lambda: any(" engine " in command for command in children(server.process.pid).values()), BACK_S)
    return next(pid for pid, command in children(server.process.pid).items() if " engine " in command)


def fronts_of(server: ServerProcess) -> list[int]:
    return [pid for pid, command in children(server.process.pid).items() if "server.front" in command]


def connections(pid: int, port: int) -> set[int]:
    """The ports of the clients that a process has a connection with."""
    inodes, found = set(), set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # a front that starts closes files while they are listed
            inodes.add(os.readlink(fd))
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[1].rpartition(":")[2], 16) == port and f"socket:[{fields[9]}]" in inodes:
            found.add(int(fields[2].rpartition(":")[2], 16))
    return found - {0}


def serves(server: ServerProcess, pid: int) -> bool:
    """Whether a connection came to this front."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as one:
        time.sleep(0.02)
        return one.getsockname()[1] in connections(pid, server.port)


@contextmanager
def on_both(server: ServerProcess, most: int = 60) -> Iterator[dict[int, list[Victim]]]:
    """Streams under way, at least two of them on each front, by the front's process."""
    by_front: dict[int, list[Victim]] = {pid: [] for pid in fronts_of(server)}
    with ExitStack() as stack:
        for _ in range(most):
            before = {pid: connections(pid, server.port) for pid in by_front}
            one = stack.enter_context(_streaming(server))
            new = {pid: connections(pid, server.port) - before[pid] for pid in by_front}
            for pid, ports in new.items():
                by_front[pid] += [one] * bool(ports)
            if all(len(streams) > 1 for streams in by_front.values()):
                break
        assert all(len(streams) > 1 for streams in by_front.values()), "one front takes all connections"
        yield by_front


@contextmanager
def _streaming(server: ServerProcess) -> Iterator[Victim]:
    one = Victim(server.port, ALPHABET, ALPHABET_TEXT)
    one.start()
    assert one.started.wait(60), one.ended
    try:
        yield one
    finally:
        one.stop()


def healthy(server: ServerProcess) -> bool:
    try:
        return server.request("GET", "/health")[0] == 200
    except OSError:
        return False


def test_a_front_that_is_killed_hurts_nobody(server: ServerProcess) -> None:
    said = len(server.lines)
    with on_both(server) as by_front:
        killed, other = by_front
        running = sum(map(len, by_front.values()))
        until(lambda: server.metric("tilewright_requests_running") == running)
        os.kill(killed, signal.SIGKILL)
        until(lambda: server.metric("tilewright_requests_running") == len(by_front[other]))
        for one in by_front[killed]:
            one.join(60)
            assert one.ended == "closed"
        until(lambda: len(fronts_of(server)) == 2 and killed not in fronts_of(server), BACK_S)
        [new] = set(fronts_of(server)) - {other}
        until(lambda: serves(server, new), BACK_S)
        with on_both(server):  # the new one serves, too
            pass
        for one in by_front[other]:
            one.check()
    until(lambda: server.metric("tilewright_requests_running") == 0)
    assert server.metric("tilewright_kv_pages_used") == 0
    assert [line for line in server.lines[said:] if "was ended by signal 9" in line], server.lines[said:]


def test_an_engine_that_is_killed_is_said_at_once_and_started_again(server: ServerProcess) -> None:
    said = len(server.lines)
    before = server.metric('tilewright_http_requests_total{path="/v1/completions",status="200"}')
    with on_both(server) as by_front:
        streams = [one for several in by_front.values() for one in several]
        killed_s = awake_s()
        os.kill(engine_of(server), signal.SIGKILL)
        for one in streams:
            one.join(60)
            assert "the engine process has ended" in one.ended
        assert awake_s() - killed_s < 5
        for _ in range(8):  # whichever front answers
            assert server.request("GET", "/health")[0] == 503
            status, headers, body = server.post(prompt="ab")
            assert status == 503
            assert b"is being restarted" in body
            assert "retry-after" in headers
    until(lambda: all(healthy(server) for _ in range(16)), BACK_S)  # whichever front answers: each hears of it by itself
    status, _, body = server.post(prompt="ab", max_tokens=5, temperature=0)
    assert (status, b"cdefg" in body) == (200, True)
    lines = [line for line in server.lines[said:] if "ended by signal" in line]
    assert len(lines) == 1, lines
    assert server.metric('tilewright_http_requests_total{path="/v1/completions",status="200"}') > before, "counts stay"


def test_a_front_that_is_stopped_holds_nobody_up(server: ServerProcess) -> None:
    engine = engine_of(server)
    with on_both(server) as by_front:
        stopped, other = by_front
        os.kill(stopped, signal.SIGSTOP)
        try:
            before_kb = resident_kb(engine)
            seen = [len(one.text) for one in by_front[other]]
            time.sleep(3)
            assert resident_kb(engine) - before_kb < 16 << 10
            for one, had in zip(by_front[other], seen, strict=True):
                assert len(one.text) > had + 20
        finally:
            os.kill(stopped, signal.SIGCONT)
        for one in by_front[other]:
            one.check()
    until(lambda: server.metric("tilewright_requests_running") == 0, 20)
    with on_both(server):  # both serve again
        pass


def resident_kb(pid: int) -> int:
    return int(Path(f"/proc/{pid}/status").read_text().partition("VmRSS:")[2].split()[0])


def test_metrics_are_those_of_all_fronts(server: ServerProcess) -> None:
    name = 'tilewright_http_requests_total{path="/version",status="200"}'
    before = server.metric(name)
    for _ in range(40):
        server.request("GET", "/version")
    until(lambda: server.metric(name) == before + 40)
    time.sleep(1)
    assert {server.metric(name) for _ in range(10)} == {before + 40}, "each front says the same, and nothing twice"
    tokens = server.metric("tilewright_inter_token_latency_seconds_count")
    for _ in range(6):
        server.post(prompt="ab", max_tokens=11)
    until(lambda: server.metric("tilewright_inter_token_latency_seconds_count") == tokens + 60)
    assert server.metric("process_resident_memory_bytes") > 2e8, "of four processes, or three"


@pytest.mark.parametrize("engine", [("0.005",), pytest.param(("0", "hangs"), marks=pytest.mark.long)])
def test_a_parent_that_is_killed_leaves_nobody_behind(engine: tuple[str, ...]) -> None:
    with server_process("tests.server.fake_server", *engine, "fronts=1", "step_timeout_s=0.5") as server:
        left = children(server.process.pid)
        assert len(left) == 2
        if "hangs" in engine:
            with connect(server) as one:
                one.sendall(generation())
                until(lambda: not healthy(server))
        server.process.kill()
        until(lambda: not [pid for pid in left if Path(f"/proc/{pid}").exists() and state(pid) != "Z"], END_S)


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def test_a_signal_drains_all_fronts(server: ServerProcess) -> None:
    """The last one: the server has ended after it."""
    with on_both(server) as by_front:
        server.process.send_signal(signal.SIGTERM)
        # Which front takes a connection is the kernel's choice, so one of them may be the last to hear of the signal.
        until(lambda: {server.request("GET", "/ready")[0] for _ in range(8)} == {503})
        until(lambda: {server.post(prompt="ab")[0] for _ in range(8)} == {503})
        for one in (one for several in by_front.values() for one in several):
            one.join(60)
            assert "did not finish in time" in one.ended
    assert server.process.wait(END_S) == 143


def test_an_engine_that_cannot_start_ends_the_server() -> None:
    command = [sys.executable, "-m", "tests.server.fake_server", "0", "missing", "fronts=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "error: there is no such model" in done.stderr.splitlines()


def test_the_folder_is_private_and_fronts_share_the_limits() -> None:
    with private_folder() as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        config = ServerConfig(fronts=3, max_connections=100, cors_origins=("https://a.example",), api_key="k", max_wait_s=1e300)
        write_config(folder, config)
        found = read_config(folder)
        assert (found.max_connections, found.cors_origins, found.api_key) == (34, ("https://a.example",), "k")


# Many of them -----------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.timeout(900)
def test_two_thousand_streams_and_many_idle_connections() -> None:
    """2,048 open streams beside thousands of connections that say nothing: none is lost, and memory is flat."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = hard if hard != resource.RLIM_INFINITY else 1 << 16
    idle = max(500, min(10_000, most // 2) - 2500)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    options = ("fronts=2", "max_connections=20_000", "max_wait_s=600.0", "head_timeout_s=600.0")
    try:
        with server_process("tests.server.fake_server", "0.02", *options, "many") as server, ExitStack() as stack:
            for _ in range(idle):
                stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60))
            made = (socket.create_connection(("127.0.0.1", server.port), timeout=300) for _ in range(2048))
            streams = [stack.enter_context(one) for one in made]
            for one in streams:
                one.sendall(ASKED)
            sizes: list[int] = []
            texts = [read_all(one, lambda: sizes.append(memory(server))) for one in streams]
            assert all(text.count(b"data: [DONE]") == 1 for text in texts)
            assert len({text.count(b'"text"') for text in texts}) <= 120, "each has its hundred tokens"
            assert max(sizes) - sizes[len(sizes) // 4] < 200 << 10, "kilobytes, of all processes"
            until(lambda: server.metric("tilewright_requests_running") == 0)
            assert server.metric("tilewright_requests_finished_total") == 2048
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


BODY = b'{"prompt": "ab", "max_tokens": 100, "temperature": 0, "stream": true}'
ASKED = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
    + f"content-length: {len(BODY)}\r\n\r\n".encode()
    + BODY
)


def memory(server: ServerProcess) -> int:
    return sum(resident_kb(pid) for pid in (server.process.pid, *children(server.process.pid)))


def read_all(connection: socket.socket, look: Callable[[], None]) -> bytes:
    found = b""
    while piece := connection.recv(1 << 16):
        found += piece
    look()
    return found
