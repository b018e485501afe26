"""POST /predict/NAME: inference without a special protocol, for a browser, a spreadsheet or curl.

| content type                | the body                                                                                      |
|-----------------------------|-----------------------------------------------------------------------------------------------|
| application/json            | {"x": [[...], ...]} with the names of the inputs, or only the list if there is one input      |
| text/csv                    | a table of numbers, one row per line, for a model with one input [rows, columns]; the first   |
|                             | line may contain column names                                                                 |
| image/png, image/jpeg ...   | an image, for a model with one input [rows, 1 or 3, height, width]. The image is cropped at   |
|                             | the center to the aspect ratio of the input, and resized. Values are 0 to 1 (UINT8: 0 to 255) |

The answer is {"model", "version", "outputs": {name: nested lists}}, or CSV if `Accept` is text/csv.
"""

import csv
import io
import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tilewright.extras import needed
from tilewright.host.compare import array_of
from tilewright.host.errors import Refused
from tilewright.host.host import Answer
from tilewright.host.tensors import DATATYPES, Signature, TensorSpec, Wire
from tilewright.host.version import Ask
from tilewright.server.v2.codec import DEFAULT_PRIORITY, numbers, shape_of

__all__ = ["Predicting", "predict"]

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
MAX_PIXELS = 64 << 20
"""Most pixels of an image; checked before it is decoded."""


@dataclass
class Predicting:
    """The inputs and options of a request."""

    inputs: dict[str, Wire]
    ask: Ask = field(default_factory=lambda: Ask(priority=DEFAULT_PRIORITY))

    def answered(self, answer: Answer, accept: str) -> tuple[str, Any]:
        """(media type, answer). Raises Refused: the outputs are not a table, or have numbers that JSON cannot represent."""
        arrays = {name: array_of(wire) for name, wire in answer.outputs.items()}
        if accept.partition(";")[0].strip() == "text/csv":
            return "text/csv", _table(arrays)
        if not all(np.isfinite(array).all() for array in arrays.values()):
            raise Refused("the outputs have numbers that JSON does not have (NaN or infinity); ask for text/csv")
        outputs = {name: array.tolist() for name, array in arrays.items()}
        return "application/json", {"model": answer.model, "version": answer.version, "outputs": outputs}


def predict(signature: Signature, raw: bytes, content_type: str) -> Predicting:
    """Read the inputs of a model from a body. Raises Refused."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind in ("application/json", ""):
        return Predicting(_json(signature, raw))
    if kind == "text/csv":
        return Predicting(_csv(signature, raw))
    if kind.startswith("image/"):
        return Predicting(_image(signature, raw))
    raise Refused(f"content-type is {kind[:80]!r}, wanted application/json, text/csv or an image's")


def _json(signature: Signature, raw: bytes) -> dict[str, Wire]:
    try:
        said = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise Refused(f"the body is no JSON: {str(error)[:100]}") from None
    if not isinstance(said, dict):
        said = {_only(signature, "a bare list").name: said}
    elif set(said) == {"inputs"} and isinstance(said["inputs"], dict):
        said = said["inputs"]
    known = {spec.name: spec for spec in signature.inputs}
    wrong = [name for name in said if name not in known] or [name for name in known if name not in said]
    if wrong:
        raise Refused(f"the body's names differ from the inputs in {wrong[0][:100]!r}; wanted {', '.join(known)}")
    return {name: _nested(known[name], value) for name, value in said.items()}


def _nested(spec: TensorSpec, value: Any) -> Wire:
    """A tensor with the shape of the nested lists. For a single row the outermost list may be missing."""
    shape, inside = list[int](), value
    while isinstance(inside, list) and len(shape) <= len(spec.shape):
        shape.append(len(inside))
        inside = inside[0] if inside else None
    if len(shape) == len(spec.shape) - 1:
        shape.insert(0, 1)
    named = shape_of(shape, spec.name)
    return Wire(spec.datatype, named, numbers(value, spec.datatype, named, spec.name))


def _only(signature: Signature, what: str) -> TensorSpec:
    if len(signature.inputs) != 1:
        names = ", ".join(spec.name for spec in signature.inputs)
        raise Refused(f"{what} is for models of one input, and this one has {names}")
    return signature.inputs[0]


def _csv(signature: Signature, raw: bytes) -> dict[str, Wire]:
    spec = _only(signature, "CSV")
    if len(spec.shape) != 2:
        raise Refused(f"CSV is for an input of rows and columns, and {spec.name!r} has shape {list(spec.shape)}")
    try:
        lines = [line for line in csv.reader(io.StringIO(raw.decode("utf-8-sig"))) if line]
    except (UnicodeDecodeError, csv.Error) as error:
        raise Refused(f"the body is no CSV: {str(error)[:100]}") from None
    table = list[list[float]]()
    for number, line in enumerate(lines):
        try:
            table.append([float(cell) for cell in line])
        except ValueError:
            if number:
                cells = ",".join(line)[:80]
                raise Refused(f"line {number + 1} of the CSV has a cell that is not a number: {cells!r}") from None
            continue  # a line of column names
        if len(table[-1]) != len(table[0]):
            raise Refused(f"line {number + 1} of the CSV has {len(table[-1])} cells, and the first {len(table[0])}")
    if not table:
        raise Refused("the CSV has no row of numbers")
    rows = table if DATATYPES[spec.datatype].torch.startswith(("float", "bfloat")) else _whole(table, spec)
    shape = (len(table), len(table[0]))
    return {spec.name: Wire(spec.datatype, shape, numbers(rows, spec.datatype, shape, spec.name))}


def _whole(table: list[list[float]], spec: TensorSpec) -> list[list[Any]]:
    if any(not cell.is_integer() for line in table for cell in line):
        raise Refused(f"input {spec.name!r} is {spec.datatype}, and the CSV has numbers with a fraction")
    kind = bool if spec.datatype == "BOOL" else int
    return [[kind(cell) for cell in line] for line in table]


def _image(signature: Signature, raw: bytes) -> dict[str, Wire]:
    spec = _only(signature, "an image")
    if len(spec.shape) != 4 or spec.shape[1] not in (1, 3) or -1 in spec.shape[2:]:
        raise Refused(f"an image is for an input [rows, 1 or 3, height, width], and {spec.name!r} has shape {list(spec.shape)}")
    images: Any = needed("PIL.Image", "images")
    _, channels, height, width = spec.shape
    try:
        with images.open(io.BytesIO(raw), formats=IMAGE_FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise Refused(f"the image has {image.width} x {image.height} pixels, wanted at most {MAX_PIXELS}")
            scale = min(image.width / width, image.height / height)
            left, top = (image.width - scale * width) / 2, (image.height - scale * height) / 2
            box = (left, top, left + scale * width, top + scale * height)
            cut = image.convert("L" if channels == 1 else "RGB").resize((width, height), images.Resampling.BILINEAR, box=box)
    except images.UnidentifiedImageError:
        raise Refused(f"the body is not an image that can be read; wanted one of {', '.join(IMAGE_FORMATS)}") from None
    except (OSError, SyntaxError, ValueError, ZeroDivisionError, images.DecompressionBombError) as error:
        raise Refused(f"the body is not an image that can be read: {str(error)[:100]}") from None
    pixels = np.asarray(cut, dtype=np.float32).reshape(height, width, channels).transpose(2, 0, 1)
    if spec.datatype not in ("FP32", "FP16", "FP64", "UINT8"):
        raise Refused(f"an image is for inputs of FP16, FP32, FP64 or UINT8, and {spec.name!r} is {spec.datatype}")
    scaled = pixels if spec.datatype == "UINT8" else pixels / 255
    data = np.ascontiguousarray(scaled, dtype=DATATYPES[spec.datatype].numpy).tobytes()
    return {spec.name: Wire(spec.datatype, (1, channels, height, width), data)}


def _table(arrays: dict[str, np.ndarray]) -> bytes:
    """A CSV table of the outputs side by side: one row per line, below a line of names."""
    flat = {name: array.reshape(len(array), -1) if array.ndim else array.reshape(1, 1) for name, array in arrays.items()}
    if len({len(array) for array in flat.values()}) != 1:
        raise Refused("the outputs have different numbers of rows, so they are not a table; ask for application/json")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    heads = [[name] if array.shape[1] == 1 else [f"{name}_{i}" for i in range(array.shape[1])] for name, array in flat.items()]
    writer.writerow([head for own in heads for head in own])
    writer.writerows([cell for row in rows for cell in row.tolist()] for rows in zip(*flat.values(), strict=True))
    return text.getvalue().encode()
