"""The named sets of shapes, and what `bench` says to shapes and formats that it does not know."""

import pytest
import torch
from typer.testing import CliRunner

from tilewright.bench import layers
from tilewright.bench.op import shapes_of
from tilewright.bench.sets import SETS, aligned
from tilewright.cli.root import app
from tilewright.kernels.gemm.linear import linear_op
from tilewright.op import scope


@pytest.mark.parametrize("name", SETS)
def test_every_shape_of_a_set_is_one_of_a_product(name: str) -> None:
    assert len(shapes_of(linear_op, ["dtype=fp16"], None, name)) == len(SETS[name]) == len(set(SETS[name]))


def test_the_awkward_are_forty() -> None:
    assert len(SETS["awkward"]) == 40


NEXT = {
    "M=2049 N=2049 K=2049": "M=2049 N=2056 K=2056",
    "M=16 N=50257 K=4096": "M=16 N=50264 K=4096",
    "M=16 N=4096 K=4096 offset=x": "M=16 N=4096 K=4096",
    "M=4096 N=4096 K=1000": "M=4096 N=4096 K=1000",
}


@pytest.mark.parametrize("words", NEXT)
def test_the_next_aligned_shape(words: str) -> None:
    assert " ".join(aligned(words.split())) == NEXT[words]


@pytest.mark.parametrize("asked", [False, True])
def test_layers_are_measured_in_the_invariant_scope_where_asked_for(asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "randn", lambda *shape, **_: torch.ones(*shape))
    figures = {"format": "int8", "us": 2.0, "bf16_us": 3.0, "ratio": 1.5}
    monkeypatch.setattr(layers, "_measure", lambda *_: [figures | {"invariant": scope().invariant}])
    shapes, said = [(1, 8, 16), (64, 8, 16)], []
    assert list(layers.rows(["int8"], shapes, "none", said.append, asked)) == [figures | {"invariant": asked}] * 2
    assert said[1] == "  int8 2.0 us; bf16 3.0 us, ratio 1.5"
    assert not scope().invariant


CASES = (
    (["linear", "--set", "awkwrad"], "awkward"),
    (["linear", "--set", "squares", "--shapes", "M=1,N=2,K=3"], "cannot be combined"),
    (["linear", "M=1", "N=2", "K=3", "offset=y"], "wanted none, x or weight"),
    (["softmax", "--aligned"], "--aligned is only for linear; got softmax"),
    (["layers", "int9"], "int8"),
    (["layers", "int8", "--activation", "tanh"], "silu_mul"),
    (["layers", "int8", "--shapes", "64x4096"], "ROWSxOUTPUTSxINPUTS"),
    (["layers", "int8", "--shapes", "64x4096x99999999"], "at most 1048576"),
)


@pytest.mark.parametrize(("words", "said"), CASES, ids=lambda case: " ".join(case) if isinstance(case, list) else "")
def test_wrong_words_are_answered(words: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["bench", *words])
    assert result.exit_code == 1
    assert said in result.output
