"""What a forward pass launches, and that it can be captured: the number of kernels a layer is a promise of the models."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.models.folders import LLAMA
from tests.models.running import make_batch, make_cache
from tilewright.models import ModelConfig, random_model
from tilewright.op import early_launches
from tilewright.quant import quantize

QWEN3 = ModelConfig.from_hf({**LLAMA, "architectures": ["Qwen3ForCausalLM"], "head_dim": 16, "attention_bias": True})
LLAMA3 = ModelConfig.from_hf({**LLAMA, "head_dim": 16, "mlp_bias": True, "tie_word_embeddings": True})
VIEWS = {"aten.view", "aten.split_with_sizes"}
LAYER = ["linear", "rope_kv_write", "paged_attention", "linear", "add_rms_norm", "linear", "linear"]


class Recorder(TorchDispatchMode):
    """The names of all operators that run and are not views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket)
        if name not in VIEWS:
            self.names.append(name.removeprefix("tilewright."))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("config", [QWEN3, LLAMA3], ids=["qwen3", "llama"])
@pytest.mark.parametrize(("start", "count"), [(0, 5), (5, 1)], ids=["prompt", "decode"])
def test_eight_launches_a_layer(config: ModelConfig, start: int, count: int) -> None:
    model = random_model(config, device="cpu", dtype=torch.float32)
    cache, batch = make_cache(model, 4, 4), make_batch([([3, 1], start, count)], 4)
    ids = torch.zeros(count, dtype=torch.int64)
    with Recorder() as recorder:
        model.logits(model(ids, batch, cache))
    assert recorder.names == ["aten.embedding", "rms_norm", *LAYER, "add_rms_norm", *LAYER, "add_rms_norm", "linear"]


def test_norms_quantise_for_the_layers_behind_them() -> None:
    model = random_model(QWEN3, device="cpu", dtype=torch.float32)
    quantize(model, "int8")
    cache, batch = make_cache(model, 8, 4), make_batch([([3, 1, 2, 4, 5], 0, 20)], 4)
    with Recorder() as recorder:
        model(torch.zeros(20, dtype=torch.int64), batch, cache)
    layer = ["scaled_linear", "rope_kv_write", "paged_attention", "quantize_rows", "scaled_linear", "add_rms_norm_quantize"]
    layer += ["scaled_linear", "quantize_rows", "scaled_linear"]
    names = [name for name in recorder.names if not name.startswith("aten.")]
    assert names == ["rms_norm_quantize", *layer, "add_rms_norm_quantize", *layer, "add_rms_norm"]


def test_forward_depends_on_no_value() -> None:
    """Tensors without values go through: nothing on the way asks for one, which on a GPU would be a wait."""
    with FakeTensorMode():
        model = random_model(QWEN3, device="cpu", dtype=torch.bfloat16)
        cache, batch = make_cache(model, 4, 4), make_batch([([3, 1], 0, 5)], 4)
        logits = model.logits(model(torch.zeros(5, dtype=torch.int64), batch, cache))
    assert (logits.shape, logits.dtype) == ((5, 31), torch.bfloat16)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: a CUDA graph needs one")
@pytest.mark.parametrize("config", [QWEN3, LLAMA3], ids=["qwen3", "llama"])
@pytest.mark.parametrize("count", [1, 5], ids=["decode", "chunk"])
def test_captured_forward_equals_eager(config: ModelConfig, count: int) -> None:
    """One graph, replayed over changed inputs, gives the bits of the eager pass; no step of it waits for the device."""
    model = random_model(config, device="cuda", dtype=torch.bfloat16)
    cache = make_cache(model, 8, 16)
    batch = make_batch([([3, 1], 16, count), ([5, 2], 9, count)], 16, "cuda", padding=1 if count == 1 else 0)
    ids = torch.zeros(batch.positions.shape[0], dtype=torch.int64, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        model(ids, batch, cache)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.cuda.set_sync_debug_mode("error")
        try:
            captured = model(ids, batch, cache)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    ids.copy_(torch.arange(len(ids)) % 31)
    batch.kv_lens[0] -= 1
    graph.replay()
    assert torch.equal(captured, model(ids, batch, cache))
    assert torch.isfinite(captured).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: a CUDA graph needs one")
@pytest.mark.parametrize("config", [QWEN3, LLAMA3], ids=["qwen3", "llama"])
def test_launches_that_start_early_have_the_same_bits(config: ModelConfig) -> None:
    """A step of one token, captured with launches that overlap, over many inputs, and beside one without."""
    model = random_model(config, device="cuda", dtype=torch.bfloat16)
    batch, ids = make_batch([([3, 1], 16, 1)], 16, "cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")
    graphs, results = [], []
    for scope in (nullcontext(), early_launches()):
        cache = make_cache(model, 8, 16)
        with scope:
            with torch.cuda.stream(torch.cuda.Stream()):
                model.logits(model(ids, batch, cache))
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                results.append(model.logits(model(ids, batch, cache)))
        graphs.append((graph, cache))
    for token in range(31):
        ids.fill_(token)
        for graph, _ in graphs:
            graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(*results), token
