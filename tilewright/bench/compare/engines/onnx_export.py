"""Exports a module to an ONNX file, and its example inputs to arrays, for engines that do not use Python or torch.

Uses torch's own exporter over torch.export, which does not decompose layer norms and gelus. An operator that cannot be
expressed in ONNX is an error that names it; nothing is left out. Shapes are those of the example.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tilewright.bench.compare.engine import EngineError, Operation, need
from tilewright.bench.compare.engines.operations import onnx_operations

__all__ = ["export_onnx", "export_program", "input_arrays", "input_name", "save_program"]

_MOST_IN_ONE_FILE = 1 << 30
"""Bytes of weights: protobuf ends at 2 GiB; above, they lie beside the file."""


def input_name(i: int) -> str:
    """Of the i-th example input, in the ONNX file and in the .npz beside it."""
    return f"input_{i}"


def input_arrays(inputs: tuple[Tensor, ...]) -> dict[str, np.ndarray]:
    """Name -> array, contiguous. EngineError: a type that numpy does not have (bf16)."""
    try:
        return {input_name(i): x.detach().cpu().contiguous().numpy() for i, x in enumerate(inputs)}
    except TypeError as error:
        raise EngineError(f"the example inputs cannot be passed on: {error}; give them as fp32 or fp16") from None


def export_onnx(
    module: nn.Module, inputs: tuple[Tensor, ...], path: Path, name: str, opset: int | None = None
) -> list[Operation]:
    """Write `module` to `path`; returns its operations. `opset`: the exporter's own, unless given.

    EngineError: what ONNX cannot say, and why.
    """
    model = export_program(module, inputs, name, opset).model
    save_program(model, path)
    return onnx_operations(model)


def export_program(
    module: nn.Module, inputs: tuple[Tensor, ...], name: str, opset: int | None = None, outputs: list[str] | None = None
) -> torch.onnx.ONNXProgram:
    """`module` in ONNX; `outputs`: their names. EngineError: see `export_onnx`."""
    need("onnxscript", "onnxruntime, openvino and cmd")
    try:
        with _quiet():
            program = torch.onnx.export(
                module,
                inputs,
                dynamo=True,
                input_names=[input_name(i) for i in range(len(inputs))],
                output_names=outputs,
                opset_version=opset,
                verbose=False,
            )
    except (torch.onnx.errors.OnnxExporterError, RuntimeError, ValueError, TypeError) as error:
        raise EngineError(f"{name} cannot be exported to ONNX{f' opset {opset}' if opset else ''}: {_reason(error)}") from error
    assert program is not None, "the exporter over torch.export returns its program"
    # Asked for, but left as it is where the exporter's converter does not know the way back.
    if opset and (got := program.model.opset_imports.get("", opset)) != opset:
        raise EngineError(f"{name}: torch's exporter does not support ONNX opset {opset} and writes {got}; leave the opset out")
    return program


def save_program(model: Any, path: Path) -> None:
    """Write a model of onnx_ir."""
    weights = sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value is not None)
    beside = f"{path.name}.data" if weights > _MOST_IN_ONE_FILE else None
    need("onnx_ir", "onnxruntime, openvino and cmd").save(model, path, external_data=beside)


def _reason(error: BaseException) -> str:
    """The innermost cause in one line: the exporter wraps it in pages of advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:600] or type(error).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter tells of its progress and of packages that are not there: of no use to somebody who compares engines."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
