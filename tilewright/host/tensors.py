"""Tensors as a protocol carries them: a datatype's name, a shape, and bytes; and what a model takes and gives.

The names are those of the Open Inference Protocol: BOOL, INT8 to INT64, UINT8 to UINT64, FP16, BF16, FP32, FP64. Bytes are
little-endian, row-major and dense. BYTES (strings) is not here: no torch model takes it.

A shape that a client names is compared with the signature and with the number of bytes that came before anything is
allocated; products are Python's integers, so that no shape can overflow.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from tilewright.host.errors import Refused
from tilewright.host.regions import Part

__all__ = ["DATATYPES", "Datatype", "Signature", "TensorSpec", "Wire", "byte_size", "checked", "zeros"]

MAX_DIMS = 16
"""Dimensions that a shape may have."""


class Datatype(NamedTuple):
    """A datatype of the protocol."""

    itemsize: int
    torch: str
    """The name of torch's dtype."""
    numpy: str | None
    """numpy's, which has no bfloat16."""
    config: str
    """What a model configuration calls it, after `TYPE_`."""


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
"""Name -> what it is."""


class Wire(NamedTuple):
    """A tensor as bytes."""

    datatype: str
    shape: tuple[int, ...]
    data: bytes | memoryview | Part
    """A part of a region is read when its batch is laid out; only inputs are parts."""

    @property
    def raw(self) -> bytes | memoryview:
        """The bytes of a tensor that is in no region."""
        assert not isinstance(self.data, Part)
        return self.data


class TensorSpec(NamedTuple):
    """An input or output of a model. -1 in the shape is any number."""

    name: str
    datatype: str
    shape: tuple[int, ...]

    def json(self) -> dict[str, Any]:
        """As the protocol's metadata has it."""
        return {"name": self.name, "datatype": self.datatype, "shape": list(self.shape)}


class Signature(NamedTuple):
    """What a model takes and gives.

    `batched`: the first dimension of every input and output counts rows that do not look at each other, so that requests can
    share a call.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    batched: bool

    def json(self) -> dict[str, Any]:
        """For a message or a file; `of` reads it."""
        return {"inputs": [s.json() for s in self.inputs], "outputs": [s.json() for s in self.outputs], "batched": self.batched}

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> "Signature":
        """From what `json` gave. Raises ValueError: it is something else."""
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
    """Bytes of a dense tensor."""
    return prod(shape) * DATATYPES[datatype].itemsize


def _shown(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape[:MAX_DIMS]))}{', ...' if len(shape) > MAX_DIMS else ''}]"


def checked(model: str, signature: Signature, inputs: Mapping[str, Wire], max_rows: int) -> int:
    """The rows of a request, once its inputs are those of the signature.

    Raises:
        Refused: a name, datatype, shape or size is another; the sentence has what came and what is wanted.
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
    """Inputs of one row that are zeros; other open dimensions are 8."""
    shapes = [tuple((1 if at == 0 else 8) if n == -1 else n for at, n in enumerate(s.shape)) for s in signature.inputs]
    return [
        Wire(spec.datatype, shape, bytes(byte_size(spec.datatype, shape)))
        for spec, shape in zip(signature.inputs, shapes, strict=True)
    ]
