"""Which launches of a model's decoding step start early, compiled for a card that is not here."""

from collections import Counter

import pytest
import torch

from tests.models.folders import LLAMA
from tests.models.running import make_batch, make_cache
from tilewright.asm import compile as compiling
from tilewright.hw import env
from tilewright.hw.device import device_named
from tilewright.models import ModelConfig, random_model
from tilewright.op import early_launches, on_card

pytestmark = pytest.mark.skipif(env.interpreting(), reason="Triton interprets kernels in this process, and compiles none")
DENSE = {
    **LLAMA, "architectures": ["Qwen3ForCausalLM"], "head_dim": 64, "hidden_size": 256, "intermediate_size": 512,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
EXPERTS = {
    **DENSE, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip


def step(fields: dict[str, object], tokens: int = 1) -> tuple[int, Counter[tuple[str, bool]]]:
    """(layers, how often each kernel is launched early, and otherwise) of a step of `tokens` sequences on an H100."""
    config = ModelConfig.from_hf(fields)
    model = random_model(config, device="cpu", dtype=torch.bfloat16).to("meta")
    batch, ids = make_batch([([3, 1], 16, 1)] * tokens, 16, "meta"), torch.zeros(tokens, dtype=torch.int64, device="meta")
    with on_card(device_named("h100")), early_launches(), torch.no_grad(), compiling._recording(90) as launched:
        model.logits(model(ids, batch, make_cache(model, 8, 16)))
    found = Counter((kernel.metadata.name, bool(getattr(kernel.metadata, "launch_pdl", False))) for kernel, *_ in launched)
    return len(model.blocks), found


def test_all_but_attention_start_early() -> None:
    layers, found = step(DENSE)
    assert found == {
        ("_rms_norm_kernel", True): 2 * layers + 1, ("_gemv_kernel", True): 4 * layers + 1,
        ("_rope_kv_write_kernel", True): layers, ("paged_sm90_kernel", False): layers,
    }  # fmt: skip


def test_launches_of_several_rows_do_not() -> None:
    _, found = step(DENSE, 4)
    assert found
    assert not any(early for _, early in found)


def test_routers_whose_weight_is_cast_in_the_step_do_not() -> None:
    """The launch before writes what they multiply by."""
    layers, found = step(EXPERTS)
    assert found["_gemv_kernel", False] == layers
    assert found["_gemv_kernel", True] == 2 * layers + 1
