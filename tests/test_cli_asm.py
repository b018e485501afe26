"""`tilewright asm` as a user runs it: what it prints, and what it says to what it does not know."""

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from tilewright.bench.dims import find_op, parse_dims
from tilewright.cli import app
from tilewright.hw import env
from tilewright.hw.device import CARD_OF_ARCH
from tilewright.op import Inputs, Op
from tilewright.ops import ALL

needs_compiler = pytest.mark.skipif(env.interpreting(), reason="the interpreter compiles no kernel")


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["asm", *words])


def few_of(ops: tuple[Op, ...]) -> list[Any]:
    """Every fourth as it is, the others as long tests: what they compile to, the tests of certificates see."""
    return [pytest.param(op, id=op.name, marks=[pytest.mark.long] if place % 4 else []) for place, op in enumerate(ops)]


@needs_compiler
@pytest.mark.parametrize("op", few_of(ALL))
def test_every_op_has_a_judgement(op: Op) -> None:
    """Of an example that the tests of certificates compile too."""
    card = CARD_OF_ARCH[_arch(op)]
    examples = [op.examples[0], op.examples[len(op.examples) // 2]]
    problems = {example.label: op.problem(*example.make(Inputs())) for example in examples}
    label = max(problems, key=lambda name: sum(impl.refusal(card, problems[name]) is None for impl in op.impls))
    check_judgements(op, "--example", label)


@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize("op", ALL, ids=lambda op: op.name)
def test_every_op_has_a_judgement_at_the_shapes_of_its_bench(op: Op) -> None:
    check_judgements(op)


@needs_compiler
def test_without_words_the_shapes_of_the_bench_are_judged() -> None:
    check_judgements(find_op("softmax"))


def _arch(op: Op) -> int:
    return 100 if op.name == "mx_linear" else 90  # on Hopper it launches the kernels of another op


def check_judgements(op: Op, *words: str) -> None:
    done = run(op.name, *words, "--arch", str(_arch(op)), "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [one["impl"] for one in found] == [impl.name for impl in op.impls]
    kernels = [kernel for one in found for kernel in one["kernels"]]
    assert kernels
    for kernel in kernels:
        assert kernel["facts"]["registers"] > 0
        assert kernel["occupancy"]["blocks"] > 0
        assert kernel["instructions"]
        assert kernel["memory"]["accesses"] or kernel["memory"]["copies"]
        assert bool(kernel["facts"]["tma_loads"]) == any(copy["op"] == "load" for copy in kernel["memory"]["copies"])


@needs_compiler
def test_text_has_what_was_asked_for() -> None:
    done = run("matmul", "M=256", "N=512", "K=512", "--impl", "triton", "--arch", "80,90", "--config", "BLOCK_N=128")
    assert done.exit_code == 0, done.output
    for words in (
        "triton, M=256 N=512 K=512", "_tile_kernel sm_80", "_tile_kernel sm_90", "BLOCK_N=128", "no spills", "limited by",
        "mma", "wgmma", "cp.async", "3 deep", "16 bytes a thread", "no bank conflicts", "swizzled", "accumulator",
    ):  # fmt: skip
        assert words in done.stdout, words
    assert "sm_100" not in done.stdout


@needs_compiler
def test_gluon_text_has_what_was_asked_for() -> None:
    """A warp-specialised kernel: the ring that TMA fills, and who has how many registers."""
    done = run("matmul", "M=2048", "N=2048", "K=2048", "--impl", "sm90", "--arch", "90")
    assert done.exit_code == 0, done.output
    for words in ("sm90_kernel sm_90", "12 warps", "TMA load", "wgmma", " deep: ", "1 warp of 24 registers", "bytes a copy"):
        assert words in done.stdout, words


@needs_compiler
@pytest.mark.parametrize(
    ("kind", "words"),
    [("ttgir", "tt.func public @_softmax_kernel"), ("ptx", ".visible .entry _softmax_kernel"), ("sass", "LDG.E")],
)
def test_code(kind: str, words: str) -> None:
    done = run("softmax", "--example", "rows", "--arch", "90", "--show", kind)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("// _softmax_kernel, triton, rows, sm_90\n")
    assert words in done.stdout
    (found,) = json.loads(run("softmax", "--example", "rows", "--arch", "90", "--show", kind, "--json").stdout)
    assert words in found[kind]


@needs_compiler
def test_what_refuses_is_said() -> None:
    done = run("matmul", "M=256", "N=512", "K=512", "--impl", "triton_tma", "--arch", "80,90")
    assert done.exit_code == 0
    assert "triton_tma, M=256 N=512 K=512, sm_80: refused: needs sm_90, this is sm_80" in done.stdout


@needs_compiler
@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        ("matmull", 1, "there is no operator 'matmull': did you mean matmul"),
        ("softmax --impl tritn", 1, "softmax has no implementation 'tritn': did you mean triton"),
        ("softmax --example wid", 1, "softmax has no example 'wid': did you mean wide"),
        ("softmax --arch 90,91", 1, "--arch contains '91', wanted some of 80,"),
        ("softmax --arch", 2, "requires an argument"),
        ("softmax --config BLOCK_DD=64", 1, "--config is 'BLOCK_DD=64', wanted AXIS=VALUE: did you mean BLOCK_D"),
        ("softmax --config BLOCK_D", 1, "wanted AXIS=VALUE"),
        ("softmax --config BLOCK_D=100", 1, "--config BLOCK_D is '100', outside the space"),
        ("softmax --arch 90 --config BLOCK_D=16384", 1, "outside the space: BLOCK_D wider than the row needs"),
        ("softmax --show llir", 2, "wanted one of ttgir, ptx, sass"),
        ("softmax M=2 N=64 --example rows", 1, "not both"),
        ("softmax M=2", 1, "softmax: N is missing; the dimensions are M=... N=... dtype=bfloat16"),
        ("softmax M=2 K=3", 1, "softmax has no dimension 'K'"),
        ("softmax M=2 n=3", 1, "did you mean N"),
        ("softmax M=2 N=x", 1, "softmax: N is 'x', wanted an integer"),
        ("softmax M=2 N=-3", 1, "softmax: N is -3, wanted 0 or more"),
        ("softmax M=2 N=3 M=4", 1, "M is given twice"),
        ("softmax M=2 N=64 dtype=bf17", 1, "wanted a dtype: did you mean bf16"),
        ("matmul M=8 N=64 K=64 --impl triton_tma --arch 80", 1, "refused: needs sm_90"),
        ("matmul --impl vendor --arch 90", 1, "launches no Triton kernel"),
    ],
)  # fmt: skip
def test_what_it_does_not_know(words: str, code: int, error: str) -> None:
    done = run(*words.split())
    assert done.exit_code == code, done.output
    assert error in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stderr


def test_dims_have_the_types_of_make() -> None:
    import torch

    op = find_op("matmul")
    assert op.name == "linear"
    assert parse_dims(op, ["M=4", "N=8", "K=16", "dtype=fp16", "bias=true", "activation=relu"]) == {
        "M": 4, "N": 8, "K": 16, "dtype": torch.float16, "bias": True, "activation": "relu",
    }  # fmt: skip
    assert parse_dims(find_op("paged_attention"), ["B=1", "KV=64", "window=none"])["window"] is None
    assert parse_dims(find_op("paged_attention"), ["B=1", "KV=64", "window=16"])["window"] == 16
    assert parse_dims(find_op("sample"), ["M=1", "temperature=0.5"])["temperature"] == 0.5
