"""Invariant decoding on Hopper: one group of warps multiplies where two do for prompts, and by the same instructions.

For one query per sequence the config also differs in OVERLAP, which changes the order of the products and not their numbers.
"""

from collections import Counter
from typing import Any

import pytest
import torch

from tilewright.asm.compile import record
from tilewright.asm.facts import facts, instruction_mix, sass
from tilewright.hw import env
from tilewright.hw.device import CARD_OF_ARCH
from tilewright.kernels.attention.paged.attention import paged_attention_op
from tilewright.kernels.attention.paged.prefill_sm90 import INVARIANT_SM90
from tilewright.op import Inputs

pytestmark = pytest.mark.skipif(env.interpreting(), reason="the interpreter compiles no kernel")

_FLOATS = ("FFMA", "FMUL", "FADD", "FMNMX", "FSEL", "F2FP", "MUFU.EX2", "HGMMA", "SHFL.BFLY")


def floats(queries: int, dim: int) -> Counter[str]:
    """How often each instruction that computes a row's numbers stands in the machine code."""
    inputs = Inputs("meta")
    q, k, v = (inputs.randn(*shape, dim, dtype=torch.bfloat16) for shape in ((4 * queries, 16), (99, 8, 32), (99, 8, 32)))
    table, lengths, starts = (inputs.randint(0, 9, *shape, dtype=torch.int32) for shape in ((4, 9), (4,), (5,)))
    args: tuple[Any, ...] = (q, k, v, table, lengths, starts, queries, dim**-0.5, None, None, None, None)
    config = INVARIANT_SM90.space.default(CARD_OF_ARCH[90], paged_attention_op.problem(*args))
    assert config["CONSUMERS"] == (1 if queries == 1 else 2)
    (binary,) = record(INVARIANT_SM90, config, args, 90)
    # Two registers are spilled before the consumer gets its own, and two programs then fit an SM: 74 us instead of 93.
    assert facts(binary).spill_bytes <= (8 if queries == 1 else 0)
    found = instruction_mix(sass(binary))
    return Counter({name: count for name, count in found.items() if name.startswith(_FLOATS)})


@pytest.mark.parametrize("dim", [64, 128])
def test_two_groups_have_the_instructions_of_one_twice(dim: int) -> None:
    one, two = floats(1, dim), floats(2, dim)
    assert sum(one.values()) > 500
    assert two == Counter({name: 2 * count for name, count in one.items()})
