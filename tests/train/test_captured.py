"""Passes that are captured: the bits of `loss_and_grads`, room for documents, what is refused; and on a GPU the graph itself.

Without a GPU a pass is stood in for by one that is computed again into the same tensors, which is what a graph does.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.conformance import bits
from tilewright import ops
from tilewright.hw.device import device_of
from tilewright.models import SHAPES, Model, empty_model, initialise
from tilewright.ops.linear_fp8 import Fp8Recipe
from tilewright.parallel.plan import Plan
from tilewright.train.batch import TrainBatch, pack
from tilewright.train.captured import Captured, as_graph, check_graphs, documents_for, padded
from tilewright.train.config import TrainConfig
from tilewright.train.optim import AdamW
from tilewright.train.step import NextToken, Passes, SumOf, loss_and_grads, running_sum, train_step, trainable, tree_sum

GPU = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not GPU, reason="no GPU here")
needs_kernels = pytest.mark.skipif(
    not device_of(0 if GPU else -1).runs_triton, reason="no GPU here: kernels are checked in the TRITON_INTERPRET=1 run"
)
VOCAB = 120


def small_model(dtype: torch.dtype, device: str = "cpu", width: int = 64) -> Model:
    """Two blocks."""
    shape = replace(
        SHAPES["qwen3-0.6b"], num_hidden_layers=2, windows=(None, None), vocab_size=VOCAB, hidden_size=width,
        intermediate_size=2 * width, num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    model = empty_model(shape, device=device, dtype=dtype).requires_grad_(True)
    initialise(model, std=0.05)
    return model


def batch_of(lengths: Sequence[int], seed: int = 0) -> TrainBatch:
    """Documents of these lengths, whose last tokens predict something too."""
    draw = np.random.default_rng(seed)
    tokens = [draw.integers(1, VOCAB, length + 1) for length in lengths]
    return pack([(ids[:-1], ids[1:]) for ids in tokens])


def again_in_place(run: Callable[[], list[Tensor]]) -> Callable[[], list[Tensor]]:
    """What stands in for a graph: the same tensors each time."""
    results = [torch.full_like(t, float("nan")) for t in run()]

    def replay() -> list[Tensor]:
        for result, new in zip(results, run(), strict=True):
            result.copy_(new)
        return results

    return replay


def states(model: Model, updates: Sequence[Sequence[TrainBatch]], sum_of: SumOf, passes: Passes) -> list[Tensor]:
    """Losses and norms of updates, and the weights behind them."""
    optimizer, found = AdamW(trainable(model), max_norm=1.0), []
    for batches in updates:
        result = train_step(model, optimizer, batches, 1e-2, NextToken(deterministic=True), sum_of, passes)
        found += [result.loss.clone(), result.norm.clone()]
    return [*found, optimizer.master.clone()]


def check_same(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    assert len(found) == len(wanted)
    for i, (f, w) in enumerate(zip(found, wanted)):
        assert torch.equal(bits(f), bits(w)), f"result {i}: {f} is not {w}"


def test_room_for_documents() -> None:
    rooms = [documents_for(documents) for documents in range(1, 2000)]
    assert all(n <= room <= max(n + 1, 1.5 * n) for n, room in enumerate(rooms, 1))
    assert len(set(rooms)) < 40
    assert [documents_for(n) for n in (1, 4, 5, 16, 17, 25, 33)] == [1, 4, 6, 16, 24, 32, 48]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_empty_documents_change_nothing(dtype: torch.dtype) -> None:
    model, batch = small_model(dtype), batch_of((9, 1, 20, 2))
    more = padded(batch, 7, 32)
    assert more.packed.cu_q.tolist() == [0, 9, 10, 30, 32, 32, 32, 32]
    assert (more.packed.max_q_len, more.packed.cu_q.dtype, more.n_targets) == (32, torch.int32, 32)
    plain, empty = (next(iter(loss_and_grads(model, NextToken(), [one], 32))) for one in (batch, more))
    check_same(empty, plain)


@needs_kernels
@pytest.mark.parametrize("lengths", [(33, 7), (1, 40), (40,)], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_attention_of_empty_documents_behind_the_last(lengths: tuple[int, ...], dim: int) -> None:
    """Kernels write every element, and read none that lies behind the last."""
    where = "cuda" if GPU else "cpu"
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(sum(lengths), heads, dim, generator=generator).bfloat16() for heads in (2, 1, 1, 2))
    ends = np.cumsum([0, *lengths]).tolist()
    found = []
    for cu in (ends, [*ends, ends[-1], ends[-1]]):
        given = [t.to(where).requires_grad_(True) for t in (q, k, v)]
        at = torch.tensor(cu, dtype=torch.int32, device=where)
        out: Any = ops.attention(*given, causal=True, cu_q=at, cu_k=at, max_q=40, max_k=40, deterministic=True)
        found.append([out.detach(), *torch.autograd.grad(out, given, do.to(where))])
    check_same(found[1], found[0])


UPDATES = (
    ((20, 12), (32,)),
    ((5, 5, 5, 5, 12), (31, 1)),  # more documents than the first one has room for
    ((32,), (10, 10, 12)),
)


@pytest.mark.parametrize("sum_of", [running_sum, tree_sum], ids=["running", "tree"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_updates_are_those_of_plain_passes(dtype: torch.dtype, sum_of: SumOf, micro_batches: int) -> None:
    updates = [[batch_of(lengths, i) for lengths in update[:micro_batches]] for i, update in enumerate(UPDATES)]
    said: list[str] = []
    passes = Captured(32, say=said.append, capture=again_in_place)
    found = states(small_model(dtype), updates, sum_of, passes)
    check_same(found, states(small_model(dtype), updates, sum_of, loss_and_grads))
    assert [words.partition(" in ")[2] for words in said] == ["up to 2 documents", "up to 6 documents"]


def test_a_pass_of_other_sizes_is_refused() -> None:
    model, passes = small_model(torch.float32), Captured(32, capture=again_in_place)
    list(passes(model, NextToken(), [batch_of((20, 12))], 32))
    with pytest.raises(ValueError, match="a micro-batch has 31 tokens, but the pass was captured with 32; turn graphs off"):
        list(passes(model, NextToken(), [batch_of((20, 11))], 31))
    with pytest.raises(ValueError, match="a document has 33 tokens, but the captured pass allows at most 32"):
        list(passes(model, NextToken(), [batch_of((33,))], 33))


CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.mark.parametrize(
    ("changes", "device", "words"),
    [
        ({}, CUDA, None),
        ({"compute": "fp8"}, CUDA, None),
        ({"lora_rank": 8}, CUDA, None),
        ({"graphs": False}, CPU, None),
        ({}, CPU, "a CUDA device, but the device is cpu"),
        ({"parallel": Plan(dp=2)}, CUDA, "one device, but parallel is dp=2"),
        ({"accumulate": "tree"}, CUDA, "accumulate running"),
        ({"chat": True}, CUDA, "rows that are completely full"),
        ({"loss": "dpo"}, CUDA, "rows that are completely full"),
        ({"lora_rank": 8, "lora_dropout": 0.1}, CUDA, "lora_dropout 0"),
    ],
)
def test_what_cannot_be_captured_is_refused(changes: dict[str, Any], device: torch.device, words: str | None) -> None:
    config = TrainConfig(**{"graphs": True, **changes})
    if words is None:
        check_graphs(config, SHAPES["qwen3-0.6b"], device)
        return
    with pytest.raises(ValueError, match=f"graphs needs {words}"):
        check_graphs(config, SHAPES["qwen3-0.6b"], device)


def test_mixtures_are_refused() -> None:
    shape: Any = replace(SHAPES["qwen3-0.6b"], experts=object())
    with pytest.raises(ValueError, match="graphs needs a model without routed experts"):
        check_graphs(TrainConfig(graphs=True), shape, CUDA)


# ---- on a GPU


RECIPES = Fp8Recipe("row"), Fp8Recipe("tensor"), Fp8Recipe("row", weight_gradient=True)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("sum_of", [running_sum, tree_sum], ids=["running", "tree"])
@pytest.mark.parametrize("recipe", [None, *RECIPES], ids=str)
def test_a_graph_has_the_bits_of_plain_passes(recipe: Fp8Recipe | None, sum_of: SumOf) -> None:
    """512 tokens, ragged, two micro-batches an update; a second graph for more documents; then fewer again."""
    if recipe is not None and device_of(0).arch < 89:
        pytest.skip("no float8 on this card")
    lengths = (((300, 212), (512,)), ((100, 100, 312), (511, 1)), ((512,), (257, 255)))
    updates = [[batch_of(one, i).to("cuda") for one in update] for i, update in enumerate(lengths)]
    found = []
    for passes in (Captured(512), loss_and_grads):
        model = small_model(torch.bfloat16, "cuda", 256)
        for block in model.blocks:
            for layer in (block.attn.qkv, block.attn.out, block.ffn.gate_up, block.ffn.down):  # pyright: ignore
                layer.fp8 = recipe  # pyright: ignore
        found.append(states(model, updates, sum_of, passes))
    check_same(*found)


@pytest.mark.gpu
@needs_gpu
def test_a_graph_of_a_real_shape_has_the_bits_of_plain_passes() -> None:
    """Qwen3 0.6B's width, four blocks, 2 rows of 4,096 tokens in documents of unlike lengths."""
    draw, updates = np.random.default_rng(0), []
    for i in range(3):
        cuts = [np.diff([0, *sorted(draw.choice(np.arange(64, 4096), 3, replace=False)), 4096]) for _ in range(2)]
        updates.append([batch_of(np.concatenate(cuts).tolist(), i).to("cuda")])
    found = []
    for passes in (Captured(4096), loss_and_grads):
        shape = replace(SHAPES["qwen3-0.6b"], num_hidden_layers=4, windows=(None,) * 4)
        model = empty_model(shape, device="cuda", dtype=torch.bfloat16).requires_grad_(True)
        initialise(model, std=0.02)
        found.append(states(model, updates, running_sum, passes))
    check_same(*found)


@pytest.mark.gpu
@needs_gpu
def test_a_graph_reads_weights_where_the_optimizer_writes_them() -> None:
    """A negative control: a pass that kept its first weights would give the first loss again."""
    model, batch = small_model(torch.bfloat16, "cuda", 256), batch_of((64,)).to("cuda")
    passes = Captured(64, capture=as_graph)
    found = states(model, [[batch]] * 3, running_sum, passes)
    assert found[0].item() > found[2].item() > found[4].item()
