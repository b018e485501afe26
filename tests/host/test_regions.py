"""Shared memory regions by themselves: files that may not be one, how many there may be, and large reads in pieces."""

import asyncio
import gc
import os
import random
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tilewright.host import regions
from tilewright.host.instance import Instance
from tilewright.host.intake import FORGET
from tilewright.host.regions import Read, Region, Regions, read_all, shared_out


def open_files(folder: Path, process: int | str = "self") -> list[str]:
    """Files at or below a path that a process has open."""
    found = []
    for fd in os.listdir(f"/proc/{process}/fd"):
        try:
            target = os.readlink(f"/proc/{process}/fd/{fd}")
        except OSError:
            continue
        if target.startswith(str(folder)):
            found.append(target)
    return found


BAD_KEYS = ("", "/", ".", "..", "../etc", "a/b", "//a", "/a/../b", "a\0b", "a b", "sem.x", "x" * 129, None, 7, ["a"])


@pytest.mark.parametrize("key", BAD_KEYS, ids=repr)
def test_names_that_are_no_shared_memory_object(tmp_path: Path, key: Any) -> None:
    with pytest.raises(regions.Refused, match="wanted a shared memory object's name"):
        Regions(tmp_path).register("r", key, 0, 4)


NUMBERS: tuple[Any, ...] = ((0, 0), (0, -1), (-1, 4), (0, "4"), (0, 4.0), (True, 4), (0, None), (None, 4))


@pytest.mark.parametrize("numbers", NUMBERS, ids=repr)
def test_offsets_and_sizes_that_are_none(tmp_path: Path, numbers: tuple[Any, Any]) -> None:
    (tmp_path / "x").write_bytes(bytes(64))
    with pytest.raises(regions.Refused, match="wanted whole numbers"):
        Regions(tmp_path).register("r", "x", *numbers)


def test_files_that_are_no_memory_of_the_servers_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(64))
    shm = tmp_path / "shm"
    shm.mkdir()
    (shm / "link").symlink_to(secret)
    (shm / "folder").mkdir()
    os.mkfifo(shm / "pipe")
    (shm / "short").write_bytes(bytes(63))
    (shm / "good").write_bytes(bytes(64))
    (shm / "locked").write_bytes(bytes(64))
    mine = Regions(shm)
    for key, words in (
        ("nothing", "No such file"),
        ("link", "cannot be opened"),
        ("folder", "cannot be opened"),
        ("pipe", "not a regular file"),
        ("short", "has 63 bytes, but the region ends at 64"),
    ):
        with pytest.raises(regions.Refused, match=words):
            mine.register("r", key, 0, 64)
    with pytest.raises(regions.Refused, match="the region ends at 65"):
        mine.register("r", "good", 1, 64)
    with pytest.raises(regions.Refused, match="the region ends at 4611686018427387968"):
        mine.register("r", "good", 1 << 62, 64)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 12345)
        with pytest.raises(regions.Refused, match="belongs to another user"):
            mine.register("r", "good", 0, 64)
    assert not open_files(tmp_path), "a file that was refused stays open"
    mine.register("r", "good", 0, 64)
    for name, words in (("r", "is registered already"), ("", "1 to 256"), ("n" * 257, "1 to 256"), ("a\nb", "printable")):
        with pytest.raises(regions.Refused, match=words):
            mine.register(name, "good", 0, 64)
    assert len(open_files(tmp_path)) == 1


def test_numbers_and_sizes_have_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_bytes(bytes(64))
    monkeypatch.setattr(regions, "MAX_REGIONS", 3)
    monkeypatch.setattr(regions, "MAX_BYTES", 100)
    mine = Regions(tmp_path)
    mine.register("a", "x", 0, 64)
    with pytest.raises(regions.Refused, match="more than 100 bytes"):
        mine.register("b", "x", 0, 37)
    mine.register("b", "x", 0, 35)
    mine.register("c", "x", 0, 1)
    with pytest.raises(regions.Refused, match="3 shared memory regions are registered"):
        mine.register("d", "x", 0, 1)
    mine.unregister("a")
    mine.register("d", "x", 0, 64)
    mine.unregister()
    assert mine.status() == []
    assert not open_files(tmp_path)


def test_large_reads_are_shared_out_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "JOB_BYTES", 10)
    data = random.Random(0).randbytes(200)
    (tmp_path / "x").write_bytes(data)
    mine = Regions(tmp_path)
    mine.register("r", "x", 7, 190)
    for sizes in ((1,), (10,), (25,), (3, 0, 30, 7, 10, 1), (0,), (9, 1, 11)):
        into, reads, at = bytearray(sum(sizes)), [], 0
        for number, size in enumerate(sizes):
            part = mine.part(regions.Place("r", 100 - 2 * number, size))
            reads.append(Read(number, part, memoryview(into)[at : at + size]))
            at += size
        jobs = list(shared_out(reads))
        job_sizes = [sum(len(one.part) for one in job) for job in jobs]
        assert all(10 <= size < 20 for size in job_sizes[:-1])
        assert all(size < 20 for size in job_sizes)
        assert [read_all(job) for job in jobs] == [{}] * len(jobs)
        right = b"".join(data[107 - 2 * n : 107 - 2 * n + size] for n, size in enumerate(sizes))
        assert bytes(into) == right


def test_a_region_that_goes_while_a_packet_is_sent_leaves_the_packet_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector of garbage may run at any time. The process has to get each packet once."""

    def region(name: str) -> Region:
        return Region(name, name, 0, 1, os.memfd_create(name))

    async def test(pid: int) -> list[bytes]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            instance, send_fds = Instance(pid, ours), socket.send_fds
            gone, kept = region("gone"), region("kept")
            cycle: list[object] = [gone]
            cycle.append(cycle)
            instance._share(gone)
            del gone, cycle

            def collected(*words: Any) -> int:
                sent = send_fds(*words)
                gc.collect()
                return sent

            monkeypatch.setattr(socket, "send_fds", collected)
            instance._share(kept)
            await asyncio.sleep(0.01)
            theirs.setblocking(False)
            found = [theirs.recv(1 << 10) for _ in range(3)]
            with pytest.raises(BlockingIOError):
                theirs.recv(1 << 10)
            instance.close()
            return found

    with subprocess.Popen(["sleep", "600"]) as process:
        gc.collect()
        gc.disable()
        try:
            first, second, third = asyncio.run(test(process.pid))
        finally:
            gc.enable()
            process.kill()
    assert [b'"gone"' in first, b'"kept"' in second, third[:1]] == [True, True, FORGET]
