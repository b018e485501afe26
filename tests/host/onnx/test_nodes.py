"""ONNX operators one by one: the cases that onnx itself brings for those who implement them, each beside its own answers."""

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper, version_converter

from tilewright.host.onnx.module import ARRAYS_ONLY, CALLS, OPSET, OnnxModule
from tilewright.host.onnx.values import tensor_of

SHAPELESS = {
    "Expand",
    "Pad",
    "Reshape",
    "Resize",
    "Slice",
    "Split",
    "Squeeze",
    "Tile",
    "TopK",
    "Trilu",
    "Unsqueeze",
    "CumSum",
    "OneHot",
}
"""Operators whose later inputs are no data in any graph that is worth running."""
RTOL = {torch.bfloat16: 2**-6, torch.float16: 2**-9}
"""Two roundings of the type. Everything else has the limit that onnx gives the case, 1e-3: some answers have four digits."""
REFUSED = {
    "its reduction is not none": ("scatter",),
    "are not supported": ("string", "cast", "float8", "int4", "float4"),
    "keeps the aspect ratio": ("not_larger", "not_smaller"),
    "it takes the nearest pixel": ("resize",),
    "its numbers depend on": ("attention", "dropout"),
    "shape of its output depends on": ("constantofshape", "eyelike", "range", "window"),
    "it changes the batch or the channels": ("exclude_outside", "antialias"),
    "places pixels by": ("asymmetric", "crop_and_resize", "symmetric", "align_corners", "pytorch_half_pixel"),
    "its windows are dilated": ("averagepool",),
    "training mode": ("batchnorm", "dropout"),
    "linear_before_reset": ("gru",),
    "lengths, peepholes": ("gru", "lstm", "rnn"),
    "scales are of blocks": ("blocked",),
    "it quantises to": ("quantizelinear",),
    "batch_dims": ("gathernd",),
    "is not computed here": ("maxpool_with_argmax",),
    "is larger than": ("output_shape",),
    "or pads by": ("autopad",),
    "padding by": ("wrap_pad",),
    "its mode is": ("spacetodepth",),
}
"""Words of a refusal -> cases that may be refused with them."""
ABSENT = ("not implemented for", "empty_set")
"""What torch has no kernel for: unsigned numbers of more than 8 bits, and the largest of nothing."""


def cases() -> Iterator[Any]:
    """onnx's cases of the operators that have a row here, of tensors alone."""
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some of its cases divide by zero on purpose
        found = collect_testcases()
    for case in found:
        kinds = {node.op_type for node in case.model.graph.node}
        arrays = all(isinstance(one, np.ndarray | np.generic) for ins, outs in case.data_sets for one in (*ins, *outs))
        version = case.model.opset_import[0].version
        if kinds <= {*CALLS, *ARRAYS_ONLY} and arrays and version <= onnx.defs.onnx_opset_version():
            yield case


def answered(case: Any) -> None:
    """Compare a case with its own answers. Raises ValueError: it is refused."""
    model, data = onnx.ModelProto.FromString(case.model.SerializeToString()), case.data_sets[0]
    inputs, outputs = (list(map(np.asarray, one)) for one in data)
    kinds, given = {node.op_type for node in model.graph.node}, []
    shapes = bool(kinds & SHAPELESS) or any(kind.startswith("Reduce") for kind in kinds)
    for i, (value, array) in enumerate(zip(list(model.graph.input), inputs, strict=True)):
        if i and shapes and (array.dtype.kind in "iu" or array.size == 1 or "Resize" in kinds):
            model.graph.initializer.append(numpy_helper.from_array(array, value.name))
        else:
            given.append(tensor_of(array))
    if model.opset_import[0].version < OPSET:
        model = version_converter.convert_version(model, OPSET)
    found = OnnxModule(model)(*given)
    for tensor, wanted in zip(found.values(), outputs, strict=True):
        got = tensor.float().numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()
        assert got.dtype == wanted.dtype or tensor.dtype == torch.bfloat16, case.name
        if wanted.dtype.kind != "b":
            got, wanted = got.astype(np.float64), wanted.astype(np.float64)
        np.testing.assert_allclose(got, wanted, rtol=RTOL.get(tensor.dtype, case.rtol), atol=1e-5, err_msg=case.name)


@pytest.fixture(scope="module")
def results() -> dict[str, tuple[str, set[str]]]:
    """Case -> ("" where the answer is right, else why it was refused; its operators)."""
    found = dict[str, tuple[str, set[str]]]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in cases():
            try:
                answered(case)
                why = ""
            except (ValueError, RuntimeError, IndexError) as error:
                why = str(error) or type(error).__name__
            found[case.name] = why, {node.op_type for node in case.model.graph.node}
    return found


def test_answers_are_those_of_onnx(results: dict[str, tuple[str, set[str]]]) -> None:
    right = [name for name, (why, _) in results.items() if not why]
    assert len(right) >= 700, f"{len(right)} of {len(results)}"


def test_refusals_are_known_ones(results: dict[str, tuple[str, set[str]]]) -> None:
    """Nothing is refused, or fails, for a reason that the table does not have for such cases."""
    unknown = []
    for name, (why, _) in results.items():
        known = any(words in why and any(part in name.lower() for part in parts) for words, parts in REFUSED.items())
        absent = any(word in why or word in name for word in ABSENT)
        if why and not known and not absent:
            unknown.append(f"{name}: {why[:160]}")
    assert not unknown, "\n".join(unknown)


def test_every_operator_has_a_case(results: dict[str, tuple[str, set[str]]]) -> None:
    """Of each row at least one case is right."""
    seen = {kind for why, kinds in results.values() if not why for kind in kinds}
    # Rows without a case of their own in onnx: tests/host/onnx/test_models.py has them.
    assert set(CALLS) - seen <= {"GRU", "MeanVarianceNormalization"}, sorted(set(CALLS) - seen)
