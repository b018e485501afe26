"""Copies from locked memory of the host, on a GPU."""

import mmap
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tilewright.hw.copies import HostCopies

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]


def in_thread(work: Callable[[], Any]) -> Any:
    """The result of a function in a new thread, which has no CUDA context yet."""
    found = list[Any]()
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    assert found, "it raised"
    return found[0]


def test_copies_arrive_from_threads_of_their_own() -> None:
    device, size = torch.device("cuda", 0), 1 << 22
    copies = HostCopies(device)
    memory = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
    memory.copy_(torch.randint(0, 256, (size,), dtype=torch.uint8))
    address = memory.data_ptr()
    in_thread(lambda: copies.lock(address, size) or True)
    room = in_thread(lambda: copies.room(size))
    to, half = room.data_ptr(), size // 2
    in_thread(lambda: copies.begin([(to, address + half, half), (to + half, address, half)]) or True)
    copies.follow(in_thread(copies.event))
    found = room.clone()
    copies.wait()
    assert torch.equal(found.cpu(), torch.cat([memory[half:], memory[:half]]))
    with pytest.raises(RuntimeError, match=r"cuMemHostRegister_v2 .*HOST_MEMORY_ALREADY_REGISTERED"):
        copies.lock(address, size)
    in_thread(lambda: copies.unlock(address) or True)
    assert torch.ones(4, device=device).sum().item() == 4, "the error is not that of the next kernel"


@pytest.mark.parametrize("several", [True, False], ids=["one call", "older driver"])
def test_many_small_copies_arrive(several: bool) -> None:
    device, size, count = torch.device("cuda", 0), 70_001, 40
    copies = HostCopies(device)
    if not several:
        copies._copy_several = None
    elif copies._copy_several is None:
        pytest.skip("this driver has no cuMemcpyBatchAsync_v2")
    memories = [torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8) for _ in range(count)]
    for memory in memories:
        memory.copy_(torch.randint(0, 256, (size,), dtype=torch.uint8))
        copies.lock(memory.data_ptr(), size)
    room = copies.room(count * size)
    room.fill_(0)
    torch.cuda.synchronize()
    wanted = [(room.data_ptr() + i * size, memory.data_ptr(), size) for i, memory in enumerate(memories)]
    for begin in range(0, count, 16):
        copies.begin(wanted[begin : begin + 16])
    copies.follow(copies.event())
    found = room.clone()
    copies.wait()
    assert torch.equal(found.cpu(), torch.cat(memories))
    with pytest.raises(RuntimeError, match=f"a copy of {16 * size} bytes to cuda:0 cannot begin: the driver's error"):
        copies.begin([*wanted[:15], (0, memories[0].data_ptr(), size)])
    for memory in memories:
        copies.unlock(memory.data_ptr())
    assert torch.ones(4, device=device).sum().item() == 4, "the error is not that of the next kernel"


def test_memory_that_cannot_be_locked_is_an_error_of_the_driver() -> None:
    copies = HostCopies(torch.device("cuda", 0))
    empty = mmap.mmap(-1, mmap.PAGESIZE)
    address = torch.frombuffer(empty, dtype=torch.uint8).data_ptr()
    with pytest.raises(RuntimeError, match="cuMemHostRegister_v2"):
        copies.lock(address + (1 << 46), mmap.PAGESIZE)
    assert torch.ones(4, device="cuda").sum().item() == 4
