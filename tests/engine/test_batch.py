"""The packed arrays of a step against what the contract of `Step` says, computed token by token."""

import itertools

import numpy as np
import pytest
import torch

from tilewright import ops
from tilewright.engine.batch import Packer
from tilewright.engine.layout import Layout
from tilewright.engine.request import Request, SamplingParams
from tilewright.engine.step import Row, Step

PAGE = 4
LEASES = itertools.count()


def request(slot: int, prompt: int, output: int = 0, pending: int = 0, **params: object) -> Request:
    made = Request(f"r{slot}", list(range(100 * slot, 100 * slot + prompt)), SamplingParams(seed=7, **params))  # type: ignore[arg-type]
    made.slot, made.lease = slot, next(LEASES)
    made.output_ids = [900 + i for i in range(output)]
    made.pending = pending
    made.pages = [10 * slot + i for i in range(-(-(made.total + 1) // PAGE))]
    return made


def packed(step: Step, tokens: int, seqs: int, sampled: int, packer: Packer | None = None) -> dict[str, np.ndarray]:
    packer = packer or Packer(page_size=PAGE, max_seqs=8, max_pages=16)
    packer.refresh(step)
    layout = Layout(tokens, seqs, sampled)
    buffer = np.full(layout.nbytes, 0xAB, np.uint8)
    views = layout.host(buffer)
    packer.fill(views, step)
    return views


MIXED = Step.of(
    (
        Row(request(3, 5, 2), 6, 1, True),
        Row(request(1, 4, 0, pending=1), 4, 1, True),
        Row(request(2, 9), 0, 9, True),
        Row(request(5, 20, temperature=0.5, top_k=3, top_p=0.9, min_p=0.1), 8, 7, False),
    )
)


def test_mixed_step() -> None:
    got = packed(MIXED, 18, 4, 3)
    at = 0
    sampled = [row for row in MIXED.rows if row.samples]
    for b, row in enumerate(MIXED.rows):
        known = row.request.prompt_ids + row.request.output_ids
        assert got["kv_lens"][b] == row.start + row.count
        assert got["cu_q"][b] == at
        for position in range(row.start, row.start + row.count):
            page = row.request.pages[position // PAGE]
            assert got["positions"][at] == position
            assert got["slots"][at] == page * PAGE + position % PAGE
            if position < len(known):
                assert (got["token_ids"][at], got["feed"][at]) == (known[position], -1)
            else:
                assert got["feed"][at] == row.request.slot
            at += 1
        if row.samples:
            i = sampled.index(row)
            assert got["logits_rows"][i] == at - 1
            assert got["sampled_slots"][i] == row.request.slot
            assert got["sampled_at"][i] == row.start + row.count
            assert got["seed"][i] == 7
    assert got["cu_q"][4] == at == 18


def test_parameters_follow_the_slot() -> None:
    row = MIXED.rows[3]._replace(samples=True)
    got = packed(Step.of((row,)), 7, 1, 1)
    names = ("temperature", "top_k", "top_p", "min_p")
    assert [got[name][0] for name in names] == pytest.approx([0.5, 3, 0.9, 0.1])


def test_padding_rows_write_nowhere_and_see_nothing() -> None:
    got = packed(Step.of(MIXED.rows[:2]), 5, 5, 5)
    assert got["slots"][2:].tolist() == [-1] * 3
    assert got["kv_lens"][2:].tolist() == [0] * 3
    assert got["feed"][2:].tolist() == [-1] * 3
    assert got["sampled_slots"][2:].tolist() == [8] * 3
    assert got["temperature"][2:].tolist() == [0] * 3
    assert got["cu_q"].tolist() == [0, 1, 2, 3, 4, 5]


def test_tables_follow_growth_preemption_and_a_new_owner() -> None:
    packer = Packer(page_size=PAGE, max_seqs=8, max_pages=16)
    first = request(0, 6)
    step = Step.of((Row(first, 0, 6, True),))
    packer.refresh(step)
    assert packer.longest(step) == len(first.pages)
    first.pages.append(77)
    packer.refresh(Step.of((Row(first, 6, 1, True),)))
    assert packer.tables[0, 0, : len(first.pages)].tolist() == first.pages
    first.lease, first.pages = next(LEASES), [5, 6, 8]
    packer.refresh(Step.of((Row(first, 0, 6, True),)))
    assert packer.tables[0, 0, :3].tolist() == [5, 6, 8]
    second = request(0, 6, temperature=0.25)
    second.pages = [1, 2, 3]
    packer.refresh(Step.of((Row(second, 0, 6, True),)))
    assert packer.tables[0, 0, :3].tolist() == [1, 2, 3]


def test_fields_start_at_multiples_of_16() -> None:
    for counts in ((1, 1, 1), (7, 3, 2), (18, 4, 0)):
        assert all(at % 16 == 0 for _, _, at, _ in Layout(*counts).fields)


@pytest.mark.parametrize(("rows", "held"), [(1, 1), (5, 2), (16, 0), (40, 1), (77, 3), (64, 64)])
def test_tokens_are_sorted_by_adapter_as_the_layers_expect(rows: int, held: int) -> None:
    packer = Packer(page_size=PAGE, max_seqs=rows, max_pages=1)
    packer._adapter[:rows] = np.random.default_rng(rows).integers(0, held + 1, rows)
    packer._adapter[rows - 1] = held
    got = packer.adapters(np.arange(rows)).reshape(4, rows)
    if held:
        wanted = ops.adapter_order(torch.from_numpy(packer._adapter[:rows].astype(np.int64)))
        assert got.tolist() == wanted.tolist()
    else:
        assert not got.any()
