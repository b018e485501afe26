"""Tensors in the form of the protocol (a datatype's name, a shape, and bytes), and signatures of models.

The names are those of the Open Inference Protocol: BOOL, INT8 to INT64, UINT8 to UINT64, FP16, BF16, FP32, FP64. Bytes are
little-endian, row-major and dense. BYTES (strings) is not supported, because no torch model takes it.

Before anything is allocated, a client's shape is compared with the signature and with the number of received bytes. Products
are computed with Python's integers, so that no shape can overflow.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from tilewright.host.errors import Refused
from tilewright.host.regions import Part

__all__ = ["DATATYPES", "Datatype", "Signature", "TensorSpec", "Wire", "byte_size", "checked", "zeros"]

MAX_DIMS = 16
"""Most dimensions of a shape."""


class Datatype(NamedTuple):
    """A datatype of the protocol."""

    itemsize: int
    torch: str
    """The name of torch's dtype."""
    numpy: str | None
    """The dtype of numpy, which has no bfloat16."""
    config: str
    """Its name in a model configuration, after `TYPE_`."""


DATATYPES: dict[str, Datatype] = {
    "BOOL": Datatype(1, "bool", "bool", "BOOL"),
    "INT8": Datatype(1, "int8", "int8", "INT8"),
    "INT16": Datatype(2, "int16", "int16", "INT16"),
    "INT32": Datatype(4, "int32", "int32", "INT32"),
    "INT64": Datatype(8, "int64", "int64", "INT64"),
    "UINT8": Datatype(1, "uint8", "uint8", "UINT8"),
    "UINT16": Datatype(2, "uint16", "uint16", "UINT16"),
    "UINT32": Datatype(4, "uint32", "uint32", "UINT32"),
    "UINT64": Datatype(8, "uint64", "uint64", "UINT64"),
    "FP16": Datatype(2, "float16", "float16", "FP16"),
    "BF16": Datatype(2, "bfloat16", None, "BF16"),
    "FP32": Datatype(4, "float32", "float32", "FP32"),
    "FP64": Datatype(8, "float64", "float64", "FP64"),
}
"""The protocol's name -> the datatype."""


class Wire(NamedTuple):
    """A tensor as bytes."""

    datatype: str
    shape: tuple[int, ...]
    data: bytes | memoryview | Part
    """The bytes, or a part of a region, which is read when its batch is written; only inputs are parts."""

    @property
    def raw(self) -> bytes | memoryview:
        """The bytes of a tensor that is not in a region."""
        assert not isinstance(self.data, Part)
        return self.data


class TensorSpec(NamedTuple):
    """An input or output of a model. -1 in the shape is any number."""

    name: str
    datatype: str
    shape: tuple[int, ...]

    def json(self) -> dict[str, Any]:
        """The values in the form of the protocol's metadata."""
        return {"name": self.name, "datatype": self.datatype, "shape": list(self.shape)}


class Signature(NamedTuple):
    """The inputs and outputs of a model.

    `batched`: the first dimension of every input and output counts independent rows, so that requests can share a call.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    batched: bool

    def json(self) -> dict[str, Any]:
        """The signature as JSON values, for a message or a file; `of` reads it."""
        return {"inputs": [s.json() for s in self.inputs], "outputs": [s.json() for s in self.outputs], "batched": self.batched}

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> "Signature":
        """The signature from a result of `json`. Raises ValueError for anything else."""
        try:
            inputs, outputs = (
                tuple(TensorSpec(str(s["name"]), str(s["datatype"]), tuple(int(n) for n in s["shape"])) for s in said[side])
                for side in ("inputs", "outputs")
            )
            found = cls(inputs, outputs, bool(said["batched"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"the signature of the model cannot be read: {type(error).__name__}: {error}") from None
        unknown = [s.datatype for s in (*inputs, *outputs) if s.datatype not in DATATYPES]
        if unknown:
            raise ValueError(f"the signature has the datatype {unknown[0]!r}; wanted one of {', '.join(DATATYPES)}")
        return found


def byte_size(datatype: str, shape: Sequence[int]) -> int:
    """The size of a dense tensor in bytes."""
    return prod(shape) * DATATYPES[datatype].itemsize


def _shown(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape[:MAX_DIMS]))}{', ...' if len(shape) > MAX_DIMS else ''}]"


def checked(model: str, signature: Signature, inputs: Mapping[str, Wire], max_rows: int) -> int:
    """Check the inputs of a request against the signature; return its number of rows.

    Raises:
        Refused: a name, datatype, shape or size differs; the message says what was given and what was wanted.
    """
    known = [spec.name for spec in signature.inputs]
    if len(inputs) != len(known) or not all(name in inputs for name in known):
        raise Refused(
            f"model {model}: the inputs are {', '.join(map(repr, inputs))[:200]}, wanted {', '.join(map(repr, known))}"
        )
    rows = None
    for spec in signature.inputs:
        datatype, shape, data = inputs[spec.name]
        if datatype != spec.datatype:
            raise Refused(f"model {model}: input {spec.name!r} has datatype {datatype[:40]}, wanted {spec.datatype}")
        fits = len(shape) == len(spec.shape) and all(got >= 0 and want in (-1, got) for got, want in zip(shape, spec.shape))
        if not fits:
            raise Refused(f"model {model}: input {spec.name!r} has shape {_shown(shape)}, wanted {_shown(spec.shape)}")
        wanted = byte_size(datatype, shape)
        if len(data) != wanted:
            raise Refused(
                f"model {model}: input {spec.name!r} has {len(data)} bytes of data, and {datatype} of shape {_shown(shape)} "
                f"has {wanted}"
            )
        if signature.batched:
            if rows is not None and shape[0] != rows:
                raise Refused(f"model {model}: input {spec.name!r} has {shape[0]} rows, and the one before it {rows}")
            rows = shape[0]
    if rows is not None and not 1 <= rows <= max_rows:
        raise Refused(f"model {model}: the request has {rows} rows, wanted 1 to {max_rows}")
    return 1 if rows is None else rows


def zeros(signature: Signature) -> list[Wire]:
    """Inputs of zeros with one row; other open dimensions are 8."""
    shapes = [tuple((1 if at == 0 else 8) if n == -1 else n for at, n in enumerate(s.shape)) for s in signature.inputs]
    return [
        Wire(spec.datatype, shape, bytes(byte_size(spec.datatype, shape)))
        for spec, shape in zip(signature.inputs, shapes, strict=True)
    ]
