"""A model that several processes serve: the same bits as by one, and what a rank that dies leaves."""

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parallel.served import answers
from tests.server.victim import ServerProcess, server_process
from tilewright.engine.config import EngineConfig
from tilewright.engine.loading import load
from tilewright.models import ModelConfig, empty_model
from tilewright.parallel.mesh import Mesh
from tilewright.parallel.plan import Plan
from tilewright.parallel.serving import ServedCut


def by_ranks(**options: Any) -> list[dict[str, Any]]:
    """What several processes give, of which the first is not this one: the library has one group of ranks in a process."""
    command = [sys.executable, "-m", "tests.parallel.served", json.dumps(options)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


def texts(found: list[dict[str, Any]]) -> list[str]:
    """Of all requests."""
    return [output["text"] for one in found for output in one["outputs"]]


def test_two_ranks_have_the_bits_of_one() -> None:
    found, alone = by_ranks(tp=2, slices=2, speculate="ngram"), answers(slices=2, speculate="ngram")
    assert found == alone
    whole = answers()
    assert whole != alone, "slices have no rounding of their own: then this compares nothing"
    assert texts(whole) == texts(alone)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("spread", "alone"),
    [
        ({"pp": 2}, {}), ({"pp": 4, "kv_cache": "int8"}, {"kv_cache": "int8"}),
        ({"pp": 2, "tp": 2, "slices": 2}, {"slices": 2}),
    ],
    ids=str,
)  # fmt: skip
def test_layers_of_several_ranks_have_the_bits_of_one(spread: dict[str, Any], alone: dict[str, Any]) -> None:
    assert by_ranks(**spread) == answers(**alone)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_sums_in_the_librarys_order_write_the_same_text() -> None:
    assert texts(by_ranks(tp=2)) == texts(answers())


def follower_of(server: ServerProcess) -> int:
    """The process of rank 1."""
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    return next(int(child) for child in children if b"follower" in Path(f"/proc/{child}/cmdline").read_bytes())


def test_a_rank_that_dies_is_named_and_the_server_ends() -> None:
    options = ("--device", "cpu", "--tp", "2", "--port", "0", "--max-seqs", "4", "--kv-cache-gib", "0.05")
    with server_process("tilewright.cli", "serve", "bookworm", *options) as server:
        assert server.post(prompt="The sea", max_tokens=2)[0] == 200
        long: list[Any] = []
        asked = {"prompt": "The sea", "max_tokens": 1900, "ignore_eos": True}
        asking = threading.Thread(target=lambda: long.append(server.post(**asked)))
        asking.start()
        while server.metric("tilewright_requests_running") < 1:
            pass
        os.kill(follower_of(server), signal.SIGKILL)
        asking.join(30)
        assert long[0][0] >= 500
        assert b"rank 1 of 2 was ended by SIGKILL" in long[0][2]
        with suppress(HTTPException, OSError):  # where it has ended already
            assert server.post(prompt="The sea", max_tokens=2)[0] == 503
        assert server.process.wait(30) == 1
    assert "rank 1 of 2 was ended by SIGKILL" in "".join(server.lines)


@pytest.mark.long
def test_a_rank_that_dies_while_nobody_asks_ends_the_server() -> None:
    options = ("--device", "cpu", "--pp", "2", "--port", "0", "--max-seqs", "4", "--kv-cache-gib", "0.05")
    with server_process("tilewright.cli", "serve", "bookworm", *options) as server:
        os.kill(follower_of(server), signal.SIGKILL)
        assert server.process.wait(30) == 1
    assert "rank 1 of 2 was ended by SIGKILL" in "".join(server.lines)


def config_of(**more: Any) -> ModelConfig:
    """A small shape."""
    fields = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40,
        "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 6,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "float32",
    }  # fmt: skip
    return ModelConfig.from_hf({**fields, **more}, None)


MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "shape", "words"),
    [
        ({"tp": 3}, {}, "3 slices, which does not divide the heads, 8"),
        ({"tp": 8}, {}, "does not divide the key and value heads, 4"),
        ({"pp": 5}, {}, "pp is 5, more than the 4 layers"),
        ({"tp": 2}, MIXTURE, "tp cannot divide block 0 of the model"),
        ({"tp": 2}, {}, "take a model by its name or folder"),
    ],
)
def test_a_model_that_cannot_be_spread_is_one_sentence(options: dict[str, Any], shape: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load(config_of(**shape), EngineConfig(device="cpu", kv_cache_bytes=1 << 20, max_seqs=4, **options))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tp": 0}, "tp is 0, wanted 1 to 64"), ({"pp": 100}, "pp is 100, wanted 1 to 64"), ({"slices": -1}, "slices is -1"),
        ({"tp": 2, "slices": 3}, "must be tp times a power of two"),
        ({"tp": 2, "quantize": "int8"}, "quantize is 'int8', which does not go with tp"),
        ({"pp": 2, "max_adapters": 1}, "max_adapters is 1, which does not go with tp"),
        ({"pp": 2, "draft": "small"}, "draft is 'small', which does not go with tp"),
        ({"tp": 2, "bundle": "folder"}, "bundle is 'folder', which does not go with tp"),
        ({"tp": 2, "device": "cuda:1"}, "tp and pp take the cards from cuda:0 on"),
    ],
)  # fmt: skip
def test_options_that_do_not_go_together_are_one_sentence(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        EngineConfig(**options)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Gemma2ForCausalLM"])
def test_the_shares_of_all_ranks_are_the_model(architecture: str) -> None:
    config = config_of(architectures=[architecture], attention_bias=True, query_pre_attn_scalar=6, sliding_window=8)
    plan = Plan(tp=2, pp=2, slices=2)
    held = 0
    for rank in range(plan.ranks):
        model = empty_model(config, device="meta", dtype=torch.float32)
        cut = ServedCut(model, plan, plan.place(rank))
        cut.all(model)
        part = cut.part(model, Mesh())
        for block in part.blocks:
            held += sum(p.numel() for name, p in block.named_parameters() if p.dim() > 1)
    whole = empty_model(config, device="meta", dtype=torch.float32)
    assert held == sum(p.numel() for name, p in whole.blocks.named_parameters() if p.dim() > 1)
