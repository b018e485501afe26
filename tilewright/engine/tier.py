"""Moves pages of the KV cache between the device and host memory.

On the host, a page is one row that contains all layers, so that it is transferred with one copy. On the device, pages are
gathered from the layers, or scattered to them, through a buffer of `CHUNK_BYTES`. Each direction has two buffers and a stream:
while one buffer is copied, the other is gathered or scattered. On the device, the step waits for incoming pages; the host never
waits.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from tilewright.engine.host_pages import Moves
from tilewright.nn import KVCache, LatentCache

__all__ = ["CHUNK_BYTES", "HostTier", "buffer_bytes", "page_bytes_of"]

CHUNK_BYTES = 64 << 20
BLOCK_BYTES = 1 << 30
"""Host memory is allocated in blocks of up to this many bytes, because torch rounds pinned memory up to a power of two."""


def page_bytes_of(cache: KVCache | LatentCache) -> int:
    """Bytes of a page, in all layers."""
    return sum(part[:, 0].numel() * part.element_size() for part in _parts(cache))


def buffer_bytes(page_bytes: int) -> int:
    """Bytes of device memory that the buffers of a tier need."""
    return 4 * max(page_bytes, CHUNK_BYTES)


def _parts(cache: KVCache | LatentCache) -> list[Tensor]:
    """[layers, P, ...] tensors, one per kind (keys, values, ...), as views of the cache: one launch then moves all layers."""
    return [stack for kind in zip(*cache.layers, strict=True) for stack in _stacked([_wide(part) for part in kind])]


def _wide(part: Tensor) -> Tensor:
    """A view of a part with 8-byte words if its pages are dense; 1-byte dtypes as uint8, because a CPU cannot index float8."""
    part = part.view(torch.uint8) if part.element_size() == 1 else part
    if not part.is_contiguous() or part[0].numel() * part.element_size() % 8 or part.storage_offset() * part.element_size() % 8:
        return part
    return part.view(part.shape[0], -1).view(torch.int64)


def _stacked(layers: list[Tensor]) -> list[Tensor]:
    """Layers at equal distances in one allocation: one tensor [layers, P, ...]; otherwise one tensor [1, P, ...] per layer."""
    first, offsets = layers[0], [layer.storage_offset() for layer in layers]
    step = offsets[1] - offsets[0] if len(layers) > 1 else 0
    same = {layer.untyped_storage().data_ptr() for layer in layers} == {first.untyped_storage().data_ptr()}
    if not same or step < 0 or any(b - a != step for a, b in pairwise(offsets)):
        return [layer[None] for layer in layers]
    return [first.as_strided((len(layers), *first.shape), (step, *first.stride()), first.storage_offset())]


class _Way:
    """One direction: two buffers on the device, and the stream that copies them."""

    def __init__(self, pages: int, page_bytes: int, device: torch.device):
        self.buffers = [torch.empty(pages, page_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self.used = 0
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.done: list[torch.Event | None] = [None, None]
        """Events after which each buffer may be written again."""

    def next(self) -> int:
        """The number of the buffer to use next."""
        self.used += 1
        return self.used % 2


class HostTier:
    """`num_pages` rows of host memory, pinned if the cache is on a CUDA device.

    Raises:
        ValueError: there is not enough memory.
    """

    def __init__(self, cache: KVCache | LatentCache, num_pages: int):
        self._parts = _parts(cache)
        device = self._parts[0].device
        self._page_bytes = page_bytes_of(cache)
        self._chunk = max(1, CHUNK_BYTES // self._page_bytes)
        self._cuda = device.type == "cuda"
        self._block = max(1, BLOCK_BYTES // self._page_bytes)
        sizes = [min(self._block, num_pages - begin) for begin in range(0, num_pages, self._block)]
        try:
            self._rows = [torch.empty(n, self._page_bytes, dtype=torch.uint8, pin_memory=self._cuda) for n in sizes]
        except RuntimeError as error:
            asked = num_pages * self._page_bytes
            raise ValueError(f"host_cache_bytes asks for {asked:,} bytes of host memory, which are not to be had") from error
        self._out, self._in = (_Way(self._chunk, self._page_bytes, device) for _ in range(2))

    def move(self, out: Moves, back: Moves) -> None:
        """Enqueue the moves of a step: (device, host) pages out, (host, device) pages in. No page occurs twice."""
        if self._cuda:
            self._wait_for_each_other(out, back)
        for chunk in _chunks(out, self._chunk):
            self._take_out(chunk)
        for chunk in _chunks(back, self._chunk):
            self._bring_in(chunk)

    def _wait_for_each_other(self, out: Moves, back: Moves) -> None:
        """Order the two streams: `out` may write rows that an earlier step reads, `back` may read rows that one has written."""
        assert self._out.stream is not None
        assert self._in.stream is not None
        before = self._in.stream.record_event(), self._out.stream.record_event()
        if out:
            self._out.stream.wait_event(before[0])
        if back:
            self._in.stream.wait_event(before[1])

    def _take_out(self, pairs: Moves) -> None:
        pages, hosts = (list(side) for side in zip(*pairs))
        number = self._out.next()
        buffer = self._out.buffers[number]
        self._begin(self._out, number)
        index = self._index(pages)
        for part, place in self._places(buffer, len(pages)):
            place.copy_(part.index_select(1, index).transpose(0, 1))
        self._copy(self._out, [(rows, buffer[at : at + rows.shape[0]]) for at, rows in self._runs(hosts)])
        if self._cuda:
            assert self._out.stream is not None
            self._out.done[number] = self._out.stream.record_event()

    def _bring_in(self, pairs: Moves) -> None:
        hosts, pages = (list(side) for side in zip(*pairs))
        number = self._in.next()
        buffer, done = self._in.buffers[number], self._in.done[number]
        if self._in.stream is not None and done is not None:
            self._in.stream.wait_event(done)
        self._copy(self._in, [(buffer[at : at + rows.shape[0]], rows) for at, rows in self._runs(hosts)], behind=False)
        if self._in.stream is not None:
            torch.cuda.current_stream(buffer.device).wait_stream(self._in.stream)
        index = self._index(pages)
        for part, place in self._places(buffer, len(pages)):
            part.index_copy_(1, index, place.transpose(0, 1))
        if self._cuda:
            self._in.done[number] = torch.cuda.current_stream(buffer.device).record_event()

    def _begin(self, way: _Way, number: int) -> None:
        """Make the current stream wait until the buffer has been copied and may be written again."""
        done = way.done[number]
        if done is not None:
            torch.cuda.current_stream(way.buffers[0].device).wait_event(done)

    def _copy(self, way: _Way, pairs: Sequence[tuple[Tensor, Tensor]], *, behind: bool = True) -> None:
        """Copy (target, source) pairs on the stream of a direction. behind: wait for earlier work of the current stream."""
        if way.stream is None:
            for target, source in pairs:
                target.copy_(source)
            return
        if behind:
            way.stream.wait_stream(torch.cuda.current_stream(way.buffers[0].device))
        with torch.cuda.stream(way.stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)

    def _index(self, pages: list[int]) -> Tensor:
        index = torch.tensor(pages, dtype=torch.int64, pin_memory=self._cuda)
        return index.to(self._parts[0].device, non_blocking=True)

    def _runs(self, hosts: list[int]) -> Iterator[tuple[int, Tensor]]:
        """(start index, rows of host memory) for each run of consecutive ascending rows in one block."""
        breaks = (np.diff(hosts) != 1) | (np.array(hosts[1:], np.int64) % self._block == 0)
        ends = (np.flatnonzero(breaks) + 1).tolist()
        for at, end in zip([0, *ends], [*ends, len(hosts)]):
            block, row = divmod(hosts[at], self._block)
            yield at, self._rows[block][row : row + end - at]

    def _places(self, buffer: Tensor, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(part of the cache [layers, P, ...], view of its pages in a buffer [count, layers, ...]) for each part"""
        at = 0
        for part in self._parts:
            size = part[:, 0].numel() * part.element_size()
            yield part, buffer[:count, at : at + size].view(part.dtype).view(count, part.shape[0], *part.shape[2:])
            at += size


def _chunks(moves: Moves, size: int) -> Iterator[Moves]:
    for at in range(0, len(moves), size):
        yield moves[at : at + size]
