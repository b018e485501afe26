"""The state of the slots on the device: position, newest token, pages and sampling parameters of each.

A step in which each row has one token is derived from this state on the device (`ops.decode_inputs`). The host only sends what
the device does not know: lines of requests that are new or that another kind of step has advanced, new pages, and the slots
that have a row, if they differ from the step before. If nothing has changed, nothing is sent.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from tilewright import ops
from tilewright.engine.batch import LINE_WORDS, Changes
from tilewright.engine.layout import Inputs, Layout

__all__ = ["NOTHING", "SlotState", "put", "row_inputs"]

NOTHING = np.zeros(0, np.int64)


def put(buffer: np.ndarray, parts: Sequence[np.ndarray]) -> int:
    """Write arrays one after the other into a uint8 buffer; returns the number of bytes. The size of each array, except the
    last, must be a multiple of 8 bytes."""
    end = 0
    for part in parts:
        if part.size:
            begin, end = end, end + part.nbytes
            buffer[begin:end] = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
    return end


def row_inputs(rows: int, buffer: Tensor, table: Tensor, padding_slot: int) -> Inputs:
    """Inputs of `rows` padding rows with one token each. `decode_inputs` writes the rest of the buffer.

    buffer: uint8 [Layout.nbytes]. table: [kinds, rows, W] int32.
    """
    inputs = Layout(rows, rows, rows, kinds=table.shape[0]).device(buffer, table, 1)
    inputs.sampled_slots.fill_(padding_slot)
    torch.arange(rows + 1, out=inputs.batch.cu_q)
    torch.arange(rows, out=inputs.batch.logits_rows)
    return inputs._replace(feed=None)


class SlotState:
    """Tensors with one line for each of `max_seqs` slots, and one for padding.

    Args:
        lines: [max_seqs + 1, words] int64, the initial `Packer.lines`.
        last: [max_seqs + 1] int64, the latest sample of each slot.
        kinds: see `Layout`.
    """

    def __init__(self, lines: np.ndarray, last: Tensor, *, max_pages: int, page_size: int, kinds: int = 1):
        device = last.device
        self._lines, self._last, self._page_size = torch.from_numpy(lines.copy()).to(device), last, page_size
        self._tables = torch.zeros(kinds, lines.shape[0], max_pages, dtype=torch.int32, device=device)

    @staticmethod
    def nbytes(max_seqs: int, max_pages: int, kinds: int = 1) -> int:
        """The most bytes that one step sends."""
        return 4 * max_seqs * (2 * LINE_WORDS + 14 + (1 + kinds) * max_pages) + 64

    def padding(self, rows: int, width: int) -> Inputs:
        """New inputs of `rows` padding rows, with block tables of `width` pages; see `row_inputs`."""
        device, padding_slot = self._last.device, self._last.numel() - 1
        kinds = self._tables.shape[0]
        buffer = torch.zeros(Layout(rows, rows, rows, kinds=kinds).nbytes, dtype=torch.uint8, device=device)
        return row_inputs(rows, buffer, torch.zeros(kinds, rows, width, dtype=torch.int32, device=device), padding_slot)

    def tell(self, changes: Changes, rows: np.ndarray, adapters: np.ndarray, inputs: Inputs, staging: Tensor) -> None:
        """Update the state on the device with one copy.

        rows: slots of the step's rows; [] if `inputs` contains them already. adapters: int32 [4 rows], or [] likewise.
        staging: pinned memory. It must not change before the device has executed the copy.
        """
        parts = (rows, adapters, changes.line_slots, changes.lines, changes.fed_slots, changes.fed, changes.cells)
        size = put(staging.numpy(), parts)
        if not size:
            return
        arrived, at = staging[:size].to(self._last.device, non_blocking=True), 0
        views: list[Tensor] = []
        for part in parts:
            views.append(arrived[at : at + part.nbytes])
            at += part.nbytes
        wide = [view.view(torch.int64) for view in views[:6]]
        if rows.size:
            inputs.sampled_slots.copy_(wide[0])
        if adapters.size:
            inputs.adapters.copy_(views[1].view(torch.int32))
        if changes.line_slots.size:
            self._lines.index_copy_(0, wide[2], wide[3].view(-1, LINE_WORDS))
        if changes.fed_slots.size:
            self._last.index_copy_(0, wide[4], wide[5])
        if changes.cells.size:
            places, *pages = views[6].view(torch.int32).view(1 + len(self._tables), -1)
            for table, kind in zip(self._tables, pages, strict=True):
                table.view(-1).index_copy_(0, places.long(), kind)

    def derive(self, inputs: Inputs) -> None:
        """Write the inputs of a step whose rows have the slots `inputs.sampled_slots`, and advance each slot by one token."""
        batch, width = inputs.batch, inputs.batch.block_table.shape[1]
        tables = [table if width == table.shape[1] else table[:, :width].contiguous() for table in self._tables]
        if batch.window_slots is not None and batch.window_table is not None:
            # The places of windowed layers, from a copy of the lines, because only the second call may advance them.
            aside = replace(batch, slots=batch.window_slots, block_table=batch.window_table)
            self._write(inputs._replace(batch=aside), self._lines.clone(), tables[1])
        self._write(inputs, self._lines, tables[0])

    def _write(self, inputs: Inputs, lines: Tensor, table: Tensor) -> None:
        batch = inputs.batch
        ops.decode_inputs(
            inputs.sampled_slots, lines, self._last, table, self._page_size, token_ids=inputs.token_ids,
            positions=batch.positions, places=batch.slots, kv_lens=batch.kv_lens, block_table=batch.block_table,
            sampled_at=inputs.sampled_at, seed=inputs.seed, temperature=inputs.temperature, top_k=inputs.top_k,
            top_p=inputs.top_p, min_p=inputs.min_p, alternatives=inputs.alternatives,
        )  # fmt: skip
