"""A model of transformers whose linear layers are quantised: it runs, generates, and passes gradients through."""

import pytest
import torch

import tilewright as tw

transformers = pytest.importorskip("transformers")


def test_a_model_of_transformers() -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.arange(20)[None]
    with torch.no_grad():
        exact = model(ids).logits
    report = tw.quantize(model, "int8", calibration=[{"input_ids": ids}])
    assert len(report.quantized) == 14
    assert (report.layers[-1].name, report.layers[-1].format) == ("lm_head", None)
    with torch.no_grad():
        logits = model(ids).logits
        assert model.generate(ids, max_new_tokens=3, do_sample=False).shape == (1, 23)
    assert (logits - exact).norm() < 0.05 * exact.norm()
    embedded = model.model.embed_tokens(ids).detach().requires_grad_()
    model(inputs_embeds=embedded).logits.square().sum().backward()
    assert embedded.grad.norm() > 0
