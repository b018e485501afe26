"""Inputs that are derived on the device from the state of the slots, against those that are packed on the host."""

import random

import numpy as np
import pytest
import torch

from tests.engine.test_batch import LEASES, PAGE
from tests.engine.test_batch import request as make_request
from tilewright.engine.batch import Packer
from tilewright.engine.layout import Layout
from tilewright.engine.request import Request
from tilewright.engine.slots import SlotState, row_inputs
from tilewright.engine.step import Row, RowFault, Step

SEQS, PAGES = 8, 16


def any_request(rng: random.Random, slot: int) -> Request:
    params = {"temperature": rng.random(), "top_k": rng.randrange(50), "top_p": rng.uniform(0.1, 1), "min_p": rng.random()}
    one = make_request(slot, rng.randrange(1, 20), **params, logprobs=rng.choice([None, 0, 5]))  # type: ignore[arg-type]
    one.window_pages = [page + 1000 for page in one.pages]
    return one


def packer(kinds: int = 1) -> Packer:
    return Packer(page_size=PAGE, max_seqs=SEQS, max_pages=PAGES, kinds=kinds)


def some_rows(rng: random.Random, running: dict[int, Request]) -> list[Row]:
    """Requests come and go and grow, some by several tokens as in a step of another kind; most have a row."""
    for slot in range(SEQS):
        if rng.random() < 0.06 or (slot in running and len(running[slot]) > 50):
            running.pop(slot, None)
            if rng.random() < 0.7:
                running[slot] = any_request(rng, slot)
                running[slot].lease = next(LEASES)
    rows = []
    for one in running.values():
        if rng.random() < 0.1:
            one.output_ids += [rng.randrange(1000) for _ in range(rng.randrange(1, 4))]
        while len(one.pages) * PAGE < len(one):
            one.pages.append(rng.randrange(1, 200))
            one.window_pages.append(rng.randrange(1, 200))
        if rng.random() < 0.9:
            rows.append(Row(one, len(one) - 1, 1, True))
    return rows


@pytest.mark.parametrize("seed", range(20))
def test_what_is_derived_is_what_would_have_been_packed(seed: int) -> None:
    """Requests come, go, grow, and are moved on by other kinds of steps; the device is told what is new alone."""
    rng = random.Random(seed)
    last = torch.zeros(SEQS + 1, dtype=torch.int64)
    kinds = 1 + seed % 2
    told = packer(kinds)
    state = SlotState(told.lines, last, max_pages=PAGES, page_size=PAGE, kinds=kinds)
    staging = torch.zeros(SlotState.nbytes(SEQS, PAGES, kinds), dtype=torch.uint8)
    running: dict[int, Request] = {}
    sent = []
    for number in range(60):
        rows = some_rows(rng, running)
        if not rows:
            continue
        rng.shuffle(rows)
        step = Step.of(rows)
        step.fed[:] = [rng.random() < 0.5 for _ in rows]
        for row, fed in zip(rows, step.fed):
            if fed:  # its sample is on the device, from the step before
                assert row.request.slot is not None
                last[row.request.slot] = row.request.tokens(row.start, row.start + 1)[0]
        width = rng.choice([told.tables.shape[2], max(len(row.request.pages) for row in rows)])
        padding = rng.randrange(3)
        count = len(rows) + padding
        layout = Layout(count, count, count, kinds=kinds)
        table = torch.zeros(kinds, count, width, dtype=torch.int32)
        inputs = row_inputs(count, torch.zeros(layout.nbytes, dtype=torch.uint8), table, SEQS)
        slots = np.full(count, SEQS)
        slots[: len(rows)] = step.slots
        told.refresh(step)
        changes = told.changes(step)
        sent.append(changes.lines.size)
        state.tell(changes, slots, np.zeros(0, np.int64), inputs, staging)
        state.derive(inputs)
        fresh = packer(kinds)
        fresh.refresh(step)
        want = layout.host(np.zeros(layout.nbytes, np.uint8))
        fresh.fill(want, step)
        n = len(rows)
        known = torch.from_numpy(np.where(want["feed"] >= 0, last[want["feed"].clip(0)].numpy(), want["token_ids"]))
        assert inputs.token_ids[:n].tolist() == known[:n].tolist(), number
        batch = inputs.batch
        found = {"slots": batch.slots, "kv_lens": batch.kv_lens, "cu_q": batch.cu_q, "sampled_slots": inputs.sampled_slots}
        if batch.window_slots is not None:
            found["window_slots"] = batch.window_slots
        found |= {"positions": batch.positions[:n], "sampled_at": inputs.sampled_at[:n]}
        for name, got in found.items():
            assert got.tolist() == want[name][: got.numel()].tolist(), (number, name)
        for name in ("seed", "temperature", "top_k", "top_p", "min_p", "alternatives"):
            assert getattr(inputs, name).tolist() == want[name].tolist(), (number, name)
        for i, row in enumerate(rows):
            used = -(-(row.start + 1) // PAGE)
            assert batch.block_table[i, :used].tolist() == row.request.pages[:used], number
            if batch.window_table is not None:
                assert batch.window_table[i, :used].tolist() == row.request.window_pages[:used], number
        for row in rows:
            row.request.output_ids.append(rng.randrange(1000))
    assert 0 in sent or not sent, "nothing was ever known already"


def test_a_quiet_step_tells_nothing() -> None:
    told, one = packer(), make_request(3, 5)
    for start in (4, 5, 6):
        step = Step.of((Row(one, start, 1, True),))
        step.fed[:] = start > 4
        told.refresh(step)
        changes = told.changes(step)
        assert bool(changes.lines.size or changes.fed.size or changes.cells.size) == (start == 4)


def test_a_row_that_cannot_be_told_is_the_fault_of_its_request() -> None:
    told, good, bad = packer(), make_request(0, 5), make_request(1, 5)
    bad.prompt_ids = [1, 2, 3, 4, 1 << 70]
    step = Step.of((Row(good, 4, 1, True), Row(bad, 4, 1, True)))
    told.refresh(step)
    with pytest.raises(RowFault) as fault:
        told.changes(step)
    assert fault.value.request is bad
    step = Step.of((Row(good, 4, 1, True),))
    told.refresh(step)
    changes = told.changes(step)
    assert (changes.line_slots.tolist(), changes.fed.tolist(), changes.cells[1].tolist()[:2]) == ([0], [4], good.pages)
