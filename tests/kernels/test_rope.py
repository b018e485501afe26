"""The tables of kernels/elementwise/rope.py against transformers, and what the public function refuses."""

import re

import pytest
import torch

from tilewright.kernels.elementwise.rope import rope, rope_frequencies, rope_table

LLAMA = pytest.importorskip("transformers.models.llama.modeling_llama", reason="the oracle for the tables is transformers")

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LONG = {
    "rope_type": "longrope", "factor": 4.0, "short_factor": [1.0, 1.2, 1.3, 1.5], "long_factor": [1.0, 2.0, 4.0, 7.0],
    "original_max_position_embeddings": 16,
}  # fmt: skip
CASES = {
    "default": (128, 10000.0, {"rope_type": "default"}),
    "linear": (64, 10000.0, {"rope_type": "linear", "factor": 2.5}),
    "llama3": (128, 500000.0, LLAMA3),
    "llama3 of the 1B": (64, 500000.0, {**LLAMA3, "factor": 32.0}),
    "yarn": (128, 1000000.0, YARN),
    "yarn, betas": (64, 10000.0, {**YARN, "beta_fast": 24, "beta_slow": 2}),
    "yarn, attention factor": (64, 10000.0, {**YARN, "attention_factor": 0.75}),
    "yarn, mscale": (64, 10000.0, {**YARN, "factor": 40, "mscale": 1.0, "mscale_all_dim": 0.7}),
    "yarn, one mscale": (64, 10000.0, {**YARN, "factor": 40, "mscale": 1.3}),
    "yarn, not truncated": (
        64,
        150000.0,
        {**YARN, "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
    ),
    "yarn, no stretch": (64, 10000.0, {**YARN, "factor": 1.0}),
    "yarn, empty ramp": (32, 10000.0, {**YARN, "original_max_position_embeddings": 4}),
}


def theirs(head_dim: int, base: float, scaling: dict) -> tuple[torch.Tensor, float]:
    """What transformers computes for a Llama config with these parameters."""
    parameters = {**scaling, "rope_theta": base}
    config = LLAMA.LlamaConfig(hidden_size=2 * head_dim, num_attention_heads=2, head_dim=head_dim, rope_parameters=parameters)
    module = LLAMA.LlamaRotaryEmbedding(config)
    return module.inv_freq, module.attention_scaling


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_frequencies_are_those_of_transformers(case: tuple[int, float, dict]) -> None:
    head_dim, base, scaling = case
    want, want_factor = theirs(head_dim, base, scaling)
    got, got_factor = rope_frequencies(head_dim, base, scaling)
    assert got_factor == want_factor
    assert torch.equal(got, want)


@pytest.mark.parametrize("attention", [None, 1.25])
def test_longrope_is_that_of_transformers(attention: float | None) -> None:
    """The short factors for a table of what the model was trained with, the long ones for a longer one."""
    scaling = {**LONG, "attention_factor": attention}
    module = LLAMA.LlamaRotaryEmbedding(
        LLAMA.LlamaConfig(
            hidden_size=16, num_attention_heads=2, head_dim=8, rope_parameters={**scaling, "rope_theta": 500.0},
            max_position_embeddings=64,
        )
    )  # fmt: skip
    for longest in (16, 64):
        angles = module(torch.zeros(1), torch.arange(longest)[None])
        table = rope_table(8, longest, 500.0, scaling)
        for i, want in enumerate(angles):
            torch.testing.assert_close(table[:, i], want[0, :, :4], rtol=0, atol=1e-6)


def test_dynamic_is_that_of_transformers() -> None:
    """Plain up to what the model was trained with; a longer table is that of its length."""
    scaling = {"rope_type": "dynamic", "factor": 3.0, "original_max_position_embeddings": 32}
    assert torch.equal(rope_table(8, 32, 500.0, scaling), rope_table(8, 32, 500.0))
    parameters = {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 500.0}
    module = LLAMA.LlamaRotaryEmbedding(
        LLAMA.LlamaConfig(
            hidden_size=16, num_attention_heads=2, head_dim=8, rope_parameters=parameters, max_position_embeddings=32
        )
    )  # fmt: skip
    cos, sin = module(torch.zeros(1), torch.arange(50)[None])
    table = rope_table(8, 50, 500.0, scaling)
    torch.testing.assert_close(table, torch.stack((cos[0, :, :4], sin[0, :, :4]), 1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("scaling", [LLAMA3, YARN], ids=["llama3", "yarn"])
def test_both_spellings_of_a_config(scaling: dict) -> None:
    """transformers 4: "type", base outside. transformers 5: "rope_type", base inside, where it wins."""
    old = {"type" if key == "rope_type" else key: value for key, value in scaling.items()}
    new = {**scaling, "rope_theta": 777.0}
    assert torch.equal(rope_frequencies(64, 777.0, old)[0], rope_frequencies(64, 10000.0, new)[0])


def test_table_holds_cos_and_sin_of_every_position() -> None:
    frequencies, factor = rope_frequencies(8, 10000.0, YARN)
    angles = torch.outer(torch.arange(50).float(), frequencies)
    table = rope_table(8, 50, 10000.0, YARN, "cpu")
    assert table.shape == (50, 2, 4)
    assert table.dtype == torch.float32
    assert torch.equal(table[:, 0], angles.cos() * factor)
    assert torch.equal(table[:, 1], angles.sin() * factor)


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_rotation_turns_complex_numbers(interleaved: bool) -> None:
    """The definition in one line: a pair is a complex number, and the layout says where its parts lie."""
    q, k, positions = torch.randn(5, 3, 8), torch.randn(5, 2, 8), torch.tensor([0, 1, 7, 7, 30])
    turn = torch.polar(torch.ones(5, 1, 3), torch.outer(positions.float(), rope_frequencies(6, 100.0)[0])[:, None])
    got = rope(q, k, positions, rope_table(6, 31, 100.0), interleaved)
    for x, y in zip((q, k), got, strict=True):
        parts = (lambda t: t.unflatten(-1, (3, 2))) if interleaved else (lambda t: t.unflatten(-1, (2, 3)).mT)
        want = torch.view_as_real(torch.view_as_complex(parts(x[..., :6]).contiguous()) * turn)
        torch.testing.assert_close(parts(y[..., :6]), want)
        assert torch.equal(y[..., 6:], x[..., 6:])


@pytest.mark.parametrize(
    ("rotated", "scaling", "message"),
    [
        (7, None, "must be even and positive, got 7"),
        (8, {"rope_type": "ntk", "factor": 2.0}, "'ntk' is not one of default, linear, dynamic, llama3, yarn, longrope"),
        (8, {"type": "longrope"}, "'longrope' needs factor, short_factor, long_factor, original_max_position_embeddings"),
        (8, {**LONG, "short_factor": [1.0]}, "short_factor must have 4 numbers, one for each pair; got [1]"),
        (8, {"type": "yarn", "factor": 2.0}, "'yarn' needs original_max_position_embeddings"),
        (8, {"rope_type": "linear"}, "'linear' needs factor"),
    ],
)
def test_refused_scalings(rotated: int, scaling: dict | None, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        rope_frequencies(rotated, 10000.0, scaling)


@pytest.mark.parametrize(
    ("q", "k", "positions", "table", "message"),
    [
        ((2, 4, 8), (2, 8), 2, (9, 2, 4), "q must be [T, H, D]"),
        ((2, 4, 8), (3, 2, 8), 2, (9, 2, 4), "k [T, G, D]"),
        ((2, 4, 8), (2, 2, 8), 3, (9, 2, 4), "positions must be [2]"),
        ((2, 4, 8), (2, 2, 8), 2, (9, 2, 5), "R <= 8"),
        ((2, 4, 8), (2, 2, 8), 2, (9, 8), "contiguous [max_pos, 2, R/2]"),
    ],
)
def test_refused_arguments(q: tuple, k: tuple, positions: int, table: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        rope(torch.zeros(q), torch.zeros(k), torch.zeros(positions, dtype=torch.int64), torch.zeros(table))
