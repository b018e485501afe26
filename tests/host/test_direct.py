"""Regions whose pages are locked for a GPU, and copies from them. The GPU is a stand-in (copying.py)."""

import ctypes
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.host.copying import StandIn
from tilewright.host import direct
from tilewright.host.direct import MIN_BYTES, Direct, Fetched, Mapped
from tilewright.host.regions import Part, Region

PAGE = os.sysconf("SC_PAGESIZE")
ROW = MIN_BYTES


def region(folder: Path, name: str = "r", rows: int = 4, offset: int = 0) -> Region:
    """A region of so many rows; each byte of row n is n + 1."""
    path = folder / name
    path.write_bytes(bytes(offset) + b"".join(bytes([n + 1]) * ROW for n in range(rows)))
    return Region(name, name, offset, rows * ROW, os.open(path, os.O_RDWR))


@pytest.fixture
def shm() -> Iterator[Path]:
    """A folder in shared memory, as clients have it."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def locking(gpu: StandIn, *added: Region, most_bytes: int | None = None) -> Direct:
    """Everything that was added is locked, or left."""
    found = Direct(gpu, 2, 8 * ROW, most_bytes)
    for one in added:
        found.add(one)
    found.settle()
    return found


def fetched(mine: Direct, *places: tuple[Part, int], arena: int = 0) -> Fetched:
    """A batch of parts, and the bytes where they belong."""
    gathering = mine.gather(arena)
    assert all(gathering.take(part.region.number, part.at, part.size, at) for part, at in places)
    found = gathering.end()
    assert found is not None
    return found


def mapped(folder: Path) -> int:
    """The number of mappings of files in a folder."""
    return Path("/proc/self/maps").read_text().count(str(folder))


def test_a_region_is_locked_copied_from_and_unlocked_after_its_last_batch(shm: Path) -> None:
    gpu, one = StandIn(), region(shm, offset=PAGE + 40)
    mine = locking(gpu, one)
    assert mine.locked_bytes == 4 * ROW + 40, "the mapping begins with a page"
    batch = fetched(mine, (Part(one, PAGE + 40 + ROW, ROW), 2 * ROW))
    other = fetched(mine, (Part(one, PAGE + 40, ROW), 0), arena=1)
    mine.forget(one.number)
    mine.settle()
    assert gpu.locked, "two batches are under way"
    assert mine.source(one.number, PAGE + 40, ROW) is None
    arena = torch.zeros(8 * ROW, dtype=torch.uint8)
    batch.begin(arena, [(2 * ROW, 3 * ROW)])
    assert batch.memory[2 * ROW : 3 * ROW].eq(2).all()
    batch.end()
    mine.settle()
    assert gpu.locked, "one batch is under way"
    other.end()  # it has not begun
    mine.settle()
    assert (gpu.locked, mine.locked_bytes, mapped(shm), gpu.wrong) == ({}, 0, 0, [])
    assert gpu.log == ["room", "room", "lock", "begin", "begin", "wait", "wait", "unlock"]


def test_what_the_processor_read_is_added_on_the_device(shm: Path) -> None:
    gpu, one = StandIn(), region(shm)
    mine = locking(gpu, one)
    batch = fetched(mine, (Part(one, 0, ROW), ROW), (Part(one, 3 * ROW, ROW), 4 * ROW))
    arena = torch.full((8 * ROW,), 9, dtype=torch.uint8)
    batch.begin(arena, [(0, 3 * ROW), (4 * ROW, 5 * ROW), (5 * ROW + 64, 6 * ROW)])
    rows = [9, 1, 9, 0x55, 4]
    assert batch.memory[: 5 * ROW].view(5, ROW).tolist() == [[value] * ROW for value in rows]
    assert batch.memory[5 * ROW : 5 * ROW + 64].eq(0x55).all()
    assert batch.memory[5 * ROW + 64 : 6 * ROW].eq(9).all()
    batch.end()


def test_neighbours_are_one_copy_but_not_across_regions(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = StandIn()
    mine = locking(gpu)
    one = region(shm)
    side_by_side = [Mapped(one, 1 << 20, 0, 8 * ROW), Mapped(one, (1 << 20) + 2 * ROW, 0, 8 * ROW)]
    mine._rooms = [gpu.room(8 * ROW)]
    gathering = mine.gather(0)
    monkeypatch.setattr(mine, "source", lambda number, *_: side_by_side[number])
    for at, which, source in [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1), (5, 1, 2), (6, 1, 4)]:
        assert gathering.take(which, source * ROW, ROW, at * ROW)
    batch = gathering.end()
    assert batch is not None
    start, base = gpu.rooms[0].data_ptr(), 1 << 20
    assert gpu.event()[0].copies == [
        (start, base, 2 * ROW),
        (start + 2 * ROW, base + 2 * ROW, 2 * ROW),
        (start + 5 * ROW, base + 4 * ROW, ROW),
        (start + 6 * ROW, base + 6 * ROW, ROW),
    ]
    assert batch.spans == [(0, 4 * ROW), (5 * ROW, 7 * ROW)]
    assert batch.nbytes == 6 * ROW


def test_copies_begin_while_later_tensors_are_checked(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "TOGETHER", 3)
    gpu, one = StandIn(), region(shm, rows=8)
    mine = locking(gpu, one)
    gathering = mine.gather(1)
    order = [7, 0, 6, 1, 5, 2, 4, 3]
    for at, row in enumerate(order):
        assert gathering.take(one.number, row * ROW, ROW, at * ROW)
        assert gpu.log.count("begin") == (at + 1) // 3
    batch = gathering.end()
    assert batch is not None
    assert gpu.log.count("begin") == 3
    batch.begin(torch.zeros(8 * ROW, dtype=torch.uint8), [(0, 8 * ROW)])
    assert batch.memory.view(8, ROW).tolist() == [[row + 1] * ROW for row in order]
    batch.end()
    assert not gpu.wrong
    monkeypatch.setattr(direct, "TOGETHER_BYTES", 2 * ROW)
    gathering = mine.gather(0)
    for at in (0, 2):
        assert gathering.take(one.number, at * ROW, 2 * ROW, at * ROW)
    assert gpu.log.count("begin") == 5
    last = gathering.end()
    assert last is not None
    last.end()
    empty = mine.gather(0)
    assert not empty.take(one.number, 0, 8, 0)
    assert empty.end() is None


def test_small_tensors_and_bytes_outside_of_the_region_are_read(shm: Path) -> None:
    one = region(shm)
    mine = locking(StandIn(), one)
    assert mine.source(one.number, 0, MIN_BYTES - 1) is None
    assert mine.source(one.number, 0, MIN_BYTES) is not None
    assert mine.source(one.number, 3 * ROW + 1, ROW) is None
    assert mine.source(region(shm, "unknown").number, 0, ROW) is None


def test_a_bound_on_locked_bytes(shm: Path, caplog: pytest.LogCaptureFixture) -> None:
    gpu, first, second = StandIn(), region(shm, "first"), region(shm, "second", rows=5)
    mine = locking(gpu, first, second, most_bytes=8 * ROW)
    assert mine.source(first.number, 0, ROW) is not None
    assert mine.source(second.number, 0, ROW) is None
    assert f"region 'second' is not page-locked, so the processor copies its tensors: it has {5 * ROW} bytes" in caplog.text
    mine.forget(first.number)
    mine.settle()
    mine.add(second)  # which comes again in a new connection
    mine.settle()
    assert mine.source(second.number, 0, ROW) is not None
    assert mine.locked_bytes == 5 * ROW


def test_two_regions_of_one_file(shm: Path) -> None:
    gpu, one = StandIn(), region(shm)
    again = Region("again", "r", ROW, 2 * ROW, os.open(shm / "r", os.O_RDWR))
    mine = locking(gpu, one, again)
    batch = fetched(mine, (Part(one, ROW, ROW), 0), (Part(again, ROW, ROW), ROW))
    mine.forget(one.number)
    mine.settle()
    batch.begin(torch.zeros(8 * ROW, dtype=torch.uint8), [(0, 2 * ROW)])
    assert batch.memory[: 2 * ROW].eq(2).all()
    batch.end()
    mine.settle()
    assert list(gpu.locked.values()) == [2 * ROW]
    assert mine.source(again.number, ROW, ROW) is not None
    assert not gpu.wrong


@pytest.mark.parametrize("what", ["lock", "room"])
def test_what_the_driver_refuses_is_read(shm: Path, caplog: pytest.LogCaptureFixture, what: str) -> None:
    one = region(shm)
    mine = locking(StandIn([what]), one)
    assert mine.source(one.number, 0, ROW) is None
    assert (mine.locked_bytes, mapped(shm)) == (0, 0)
    assert f"so the processor copies its tensors: {what} is refused" in caplog.text


@pytest.mark.parametrize("what", ["begin", "event"])
def test_after_a_copy_that_the_driver_refuses_all_is_read(shm: Path, caplog: pytest.LogCaptureFixture, what: str) -> None:
    gpu, one = StandIn([what]), region(shm)
    mine = locking(gpu, one)
    gathering = mine.gather(0)
    assert gathering.take(one.number, 0, ROW, 0)
    assert gathering.end() is None
    assert mine.source(one.number, 0, ROW) is None
    assert f"so the processor does: {what} is refused" in caplog.text
    gpu.refuses.add("unlock")
    mine.forget(one.number)
    del gathering
    mine.settle()
    assert mapped(shm) == 1, "addresses that may be locked must not be used for anything else"


def test_regions_that_go_before_they_are_locked(shm: Path) -> None:
    gpu, one = StandIn(), region(shm)
    mine = Direct(gpu, 1, 8 * ROW)
    mine._jobs.put(lambda: mine.forget(one.number))  # before the next job
    mine.add(one)
    mine.forget(one.number)
    mine.settle()
    assert (gpu.log, mapped(shm)) == ([], 0)


def test_a_file_that_shrinks_is_read_which_says_why(shm: Path, caplog: pytest.LogCaptureFixture) -> None:
    one, short = region(shm), region(shm, "short")
    os.truncate(shm / "short", ROW)
    mine = locking(StandIn(), one, short)
    assert mine.source(short.number, 0, ROW) is None
    assert "its file has become too short" in caplog.text
    os.truncate(shm / "r", 2 * ROW)
    assert mine.source(one.number, 2 * ROW, ROW) is None
    assert mine.source(one.number, 0, ROW) is not None, "its pages are what they were"


@pytest.fixture(params=["looked at now", "looked at before"])
def looks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a look at pages is remembered at once."""
    monkeypatch.setattr(direct, "SETTLED_NS", 0 if request.param == "looked at before" else 10**15)
    return request.param == "looked at before"


def pause() -> None:
    """Until the clock of files has ticked."""
    time.sleep(0.03)


def test_pages_are_looked_at_again_only_after_a_change(shm: Path, monkeypatch: pytest.MonkeyPatch, looks: bool) -> None:
    one = region(shm)
    mine = locking(StandIn(), one)
    seen, present = list[tuple[int, int]](), mine._memory.present
    monkeypatch.setattr(mine._memory, "present", lambda *place: seen.append(place) or present(*place))
    monkeypatch.setattr(direct, "MAX_CHECKED", 2)
    pause()
    for _ in range(3):
        assert mine.source(one.number, 0, ROW) is not None
        assert mine.source(one.number, ROW, ROW) is not None
    assert len(seen) == (2 if looks else 6)
    mine.source(one.number, 0, 2 * ROW)
    mine.source(one.number, 0, ROW)
    assert len(seen) == (4 if looks else 8), "two places are remembered"
    os.pwrite(one.fd, b"new", 0)
    pause()
    for _ in range(2):
        assert mine.source(one.number, 0, ROW) is not None
    assert len(seen) == (5 if looks else 10)


def test_pages_that_a_file_no_longer_has_are_not_copied(shm: Path, caplog: pytest.LogCaptureFixture, looks: bool) -> None:
    """A file is made shorter and longer again; then its region is locked anew, but not for ever."""
    gpu, one = StandIn(), region(shm)
    mine = locking(gpu, one)
    for number in range(1, direct.MAX_LOCKS + 1):
        batch = fetched(mine, (Part(one, ROW, ROW), 0))
        batch.begin(torch.zeros(8 * ROW, dtype=torch.uint8), [(0, ROW)])
        assert batch.memory[:ROW].eq(number + 9 if number > 1 else 2).all()
        pause()
        assert mine.source(one.number, ROW, ROW) is not None
        with (shm / "r").open("r+b") as file:
            file.truncate(ROW)
            file.seek(ROW)
            file.write(bytes([number + 10]) * 3 * ROW)
        assert mine.source(one.number, 0, ROW) is not None, "this page is what it was"
        assert mine.source(one.number, 0, ROW + 1) is None
        batch.end()
        del batch
        mine.settle()
    assert mine.source(one.number, ROW, ROW) is None
    assert f"its file got other pages {direct.MAX_LOCKS} times" in caplog.text
    assert gpu.log.count("lock") == direct.MAX_LOCKS
    assert (gpu.locked, mine.locked_bytes, mapped(shm)) == ({}, 0, 0)


def test_a_hole_in_a_file_is_read(shm: Path, looks: bool) -> None:
    one = region(shm)
    mine = locking(StandIn(), one)
    pause()
    assert mine.source(one.number, 0, 3 * ROW) is not None
    keep_size, punch_hole = 1, 2
    ctypes.CDLL(None).fallocate(one.fd, keep_size | punch_hole, ctypes.c_int64(ROW), ctypes.c_int64(PAGE))
    assert mine.source(one.number, 0, 3 * ROW) is None


def test_a_system_that_does_not_say_which_pages_there_are(
    shm: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(direct._Memory, "present", lambda *_: False)
    gpu, one = StandIn(), region(shm)
    mine = locking(gpu, one)
    mine.settle()
    assert mine.source(one.number, 0, ROW) is None
    assert "does not say which pages a process has" in caplog.text
    assert (gpu.locked, mine.locked_bytes, mapped(shm)) == ({}, 0, 0)
    assert caplog.records[0].levelno == logging.WARNING
