"""Public operators given lists and numbers where tensors are wanted, and operands in the order of torch's own attention."""

import inspect

import numpy as np
import pytest
import torch

from tilewright import ops
from tilewright.ops.arguments import in_words

FUNCTIONS = [name for name in ops.__all__ if callable(getattr(ops, name))]
TAKEN_IN_WORDS = {"gated_mul"}
"""Another argument of theirs is wrong as well in the test below, and is named first."""


@pytest.mark.parametrize("given", [[1.0, 2.0], (1, 2), 4, 0.5], ids=repr)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_operator_names_what_is_no_tensor(name: str, given: object) -> None:
    parameters = inspect.signature(getattr(ops, name)).parameters.values()
    needed = [p for p in parameters if p.default is p.empty and "Tensor" in str(p.annotation)]
    others = {p.name: 4 for p in parameters if p.default is p.empty and p not in needed}
    with pytest.raises((TypeError, ValueError)) as caught:
        getattr(ops, name)(**{p.name: given for p in needed}, **others)
    said = str(caught.value)
    assert name in said
    assert "object has no attribute" not in said
    if name not in TAKEN_IN_WORDS:
        assert any(p.name in said for p in needed)


def test_an_array_is_told_how_to_become_a_tensor() -> None:
    with pytest.raises(TypeError, match=r"softmax: x must be a tensor, got ndarray .*torch\.as_tensor"):
        ops.softmax(np.zeros((2, 3)))  # pyright: ignore[reportArgumentType]


def test_a_number_for_a_sequence_is_named() -> None:
    with pytest.raises(TypeError, match="permute: dims must be a sequence of integers, got int 1"):
        ops.permute(torch.zeros(2, 3), 1)  # pyright: ignore[reportArgumentType]


def test_a_bug_inside_keeps_its_own_words() -> None:
    @in_words
    def broken(x: torch.Tensor) -> None:
        None.nothing  # type: ignore[attr-defined]  # noqa: B018

    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'nothing'"):
        broken(torch.zeros(1))
    with pytest.raises(TypeError, match="unexpected keyword argument 'y'"):
        broken(torch.zeros(1), y=1)  # pyright: ignore[reportCallIssue]


def test_operands_with_heads_first_are_told_of() -> None:
    q, k = torch.randn(2, 8, 100, 64), torch.randn(2, 4, 77, 64)
    with pytest.raises(ValueError, match=r"\[B, S, H, D\].*for \[B, H, S, D\] call ops.sdpa") as caught:
        ops.attention(q, k, k)
    assert "[2, 8, 100, 64]" in str(caught.value)
    with pytest.raises(ValueError, match="not a multiple of 3 key/value heads") as plain:
        ops.attention(torch.randn(2, 7, 8, 64), torch.randn(2, 5, 3, 64), torch.randn(2, 5, 3, 64))
    assert "sdpa" not in str(plain.value), "7 is no multiple of 5 either: these are not heads"


def test_it_is_traced_in_one_graph() -> None:
    x = torch.randn(4, 64)
    traced = torch.compile(lambda x: ops.softmax(ops.rms_norm(x, x[0])), fullgraph=True, backend="eager")
    torch.testing.assert_close(traced(x), ops.softmax(ops.rms_norm(x, x[0])))
