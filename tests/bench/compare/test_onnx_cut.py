"""Variants cut from one ONNX graph: what exporting each of them gives, with the variant's own numbers."""

import importlib.util
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.bench.compare.test_variants import all_variants, chain_of
from tilewright.bench.compare.cutting import NotCut
from tilewright.bench.compare.fairness import relative_error
from tilewright.bench.compare.measure import truth_of
from tilewright.bench.compare.variants import Variant

MISSING = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed: pip install 'tilewright[compare]'")


def answer(path: Path, variant: Variant) -> list[torch.Tensor]:
    import onnxruntime

    from tilewright.bench.compare.engines.onnx_export import input_arrays

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    wanted = {node.name for node in session.get_inputs()}
    found = session.run(None, {name: x for name, x in input_arrays(variant.inputs).items() if name in wanted})
    return [torch.from_numpy(x) for x in found]


def operations(path: Path) -> Counter[str]:
    import onnx

    return Counter(node.op_type for node in onnx.load(path).graph.node)


CASES = {
    # A batch norm taken into the weight of each copy; shortcuts.
    "residual": ["conv2 x4", "without conv2", "prefix to wide", "only wide and project", "only conv2 x16"],
    # Ids; two outputs; products with an order of their own.
    "written": ["whole", "prefix to value", "only norm", "only matmul"],
}
EXPORTED = "conv2 x4"


@pytest.mark.parametrize("name", CASES)
def test_cuts_are_what_an_export_gives(name: str, tmp_path: Path) -> None:
    """All numbers are right, so copies have the variant's weights; one of the programs is compared operation by operation."""
    from tilewright.bench.compare.engines.onnx_cut import OnnxCutter
    from tilewright.bench.compare.engines.onnx_export import export_onnx

    cutter, path = OnnxCutter(chain_of(name)), tmp_path / "cut.onnx"
    assert {v.name for v in all_variants(name)} >= set(CASES[name])
    for variant in (v for v in all_variants(name) if v.name in CASES[name]):
        cutter.save(variant, path)
        assert relative_error(answer(path, variant), truth_of(variant.module, variant.inputs)) < 1e-5, variant.name
        if variant.name == EXPORTED:
            export_onnx(variant.module, variant.inputs, tmp_path / "plain.onnx", variant.name)
            assert operations(path) == operations(tmp_path / "plain.onnx")
        variant.release()


def test_a_variant_that_cannot_be_cut_is_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewright.bench.compare.engines import onnx_cut

    exported = []

    class Broken(onnx_cut.OnnxCutter):
        def __init__(self, *rest: object):
            raise NotCut("a test says so")

    monkeypatch.setattr(onnx_cut, "OnnxCutter", Broken)
    monkeypatch.setattr(onnx_cut, "export_onnx", lambda module, inputs, path, name, opset: exported.append((name, opset)))
    variant = next(v for v in all_variants("stack") if v.name == "only 1")
    onnx_cut.OnnxParts(18).save(variant, tmp_path / "m.onnx")
    assert exported == [("only 1", 18)]
