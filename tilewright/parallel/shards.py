"""The state of a run in several files: one file per rank, and a manifest.

    shards.json            for each tensor of the whole run: shape, dtype, and which file contains which rows and columns
    rank-0000.safetensors  the tensors of rank 0; if several ranks have the same piece, the first of them writes it

A run with any other plan, and any number of ranks, can read its own pieces from these files. Nothing is pickled.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tilewright.parallel.pieces import Piece
from tilewright.parallel.ranks import Ranks
from tilewright.parallel.saved import named

__all__ = ["MANIFEST", "dealt_out", "exchanged", "file_of", "read_shards"]

MANIFEST = "shards.json"


def file_of(rank: int) -> str:
    """The name of a rank's file."""
    return f"rank-{rank:04d}.safetensors"


def described(tensors: Mapping[str, Tensor], pieces: Mapping[str, Piece]) -> list[dict[str, Any]]:
    """Describe a rank's tensors as JSON values: one entry for each of `tensors`, in order."""
    known = dict(named(tensors, pieces))
    found: list[dict[str, Any]] = []
    for name, tensor in tensors.items():
        key, piece, _ = known.get(name, (name, None, tensor))
        shape = list(tensor.shape) if piece is None else list(piece.shape)
        found.append(
            {
                "key": key, "shape": shape, "dtype": str(tensor.dtype).removeprefix("torch."),
                "rows": None if piece is None else [list(span) for span in piece.rows],
                "columns": None if piece is None else list(piece.columns),
            }
        )  # fmt: skip
    return found


def dealt_out(lists: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[dict[str, Any], list[list[int]]]:
    """From the descriptions of all ranks: (the manifest, for each rank the indices of the tensors that it writes).

    The first rank writes the tensors that do not belong to a parameter.
    """
    manifest: dict[str, Any] = {}
    writes: list[list[int]] = []
    seen = set[str]()
    for rank, entries in enumerate(lists):
        writes.append([])
        for place, entry in enumerate(entries):
            what = json.dumps([entry["key"], entry["rows"], entry["columns"]])
            if what in seen or (rank and entry["rows"] is None):
                continue
            seen.add(what)
            writes[-1].append(place)
            tensor = manifest.setdefault(entry["key"], {"shape": entry["shape"], "dtype": entry["dtype"], "shards": []})
            tensor["shards"].append(
                {"file": file_of(rank), "name": str(place), "rows": entry["rows"], "columns": entry["columns"]}
            )  # fmt: skip
    return manifest, writes


def exchanged(
    tensors: Mapping[str, Tensor], pieces: Mapping[str, Piece], world: Ranks
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(the manifest, the tensors that this rank writes, on the CPU). All ranks exchange their descriptions."""
    lists = [json.loads(text) for text in world.texts(json.dumps(described(tensors, pieces)))]
    manifest, writes = dealt_out(lists)
    values = list(tensors.values())
    return manifest, {str(place): values[place].detach().to("cpu", copy=True).contiguous() for place in writes[world.rank]}


def read_shards(folder: Path, wanted: Mapping[str, Tensor], pieces: Mapping[str, Piece]) -> dict[str, Tensor]:
    """This rank's pieces, on the CPU, with the names of `wanted`. Tensors without a piece are read whole.

    Raises:
        ValueError: a tensor is missing, is damaged, or has the wrong shape.
    """
    known = dict(named(wanted, pieces))
    found: dict[str, Tensor] = {}
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        with ExitStack() as stack:
            files: dict[str, Any] = {}
            for name, tensor in wanted.items():
                key, piece, _ = known.get(name, (name, None, tensor))
                if key not in manifest:
                    raise ValueError(f"{key} is missing")
                entry = manifest[key]
                if piece is not None and tuple(entry["shape"]) != piece.shape:
                    raise ValueError(f"{key} has shape {entry['shape']}, wanted {list(piece.shape)}")
                for shard in entry["shards"]:
                    if shard["file"] not in files:
                        path = folder / Path(shard["file"]).name
                        files[shard["file"]] = stack.enter_context(safe_open(path, framework="pt"))
                found[name] = _assembled(key, entry, piece, files)
                if found[name].shape != tensor.shape:
                    raise ValueError(f"{key} has shape {list(found[name].shape)}, wanted {list(tensor.shape)}")
    except (AttributeError, LookupError, OSError, SafetensorError, TypeError, ValueError) as error:
        raise ValueError(
            f"{folder} cannot be read ({str(error)[:300]}); remove it to continue from the checkpoint before it"
        ) from error
    return found


def _assembled(key: str, entry: Mapping[str, Any], piece: Piece | None, files: Mapping[str, Any]) -> Tensor:
    shards, shape = entry["shards"], tuple(entry["shape"])
    if shards[0]["rows"] is None:
        return files[shards[0]["file"]].get_tensor(shards[0]["name"])
    whole = Piece(of=key, shape=shape, rows=((0, shape[0]),), columns=(0, shape[1] if len(shape) > 1 else 1))
    wanted = piece or whole
    out = torch.empty(wanted.size, dtype=getattr(torch, entry["dtype"]))
    filled = 0
    for shard in shards:
        (first, last), rows = shard["columns"], tuple((start, stop) for start, stop in shard["rows"])
        stored = Piece(of=key, shape=shape, rows=rows, columns=(first, last))
        filled += sum(
            _copied(out, wanted, stored, files[shard["file"]].get_slice(shard["name"]), *cut) for cut in _meet(wanted, stored)
        )
    if filled != out.numel():
        raise ValueError(f"the files contain only {filled} of the {out.numel()} elements of {key}")
    return out


def _meet(a: Piece, b: Piece) -> Iterable[tuple[int, int, int]]:
    """The row ranges that both pieces contain: (first row within a, first row within b, number of rows) of each."""
    at = 0
    for start, stop in a.rows:
        place = 0
        for low, high in b.rows:
            first, last = max(start, low), min(stop, high)
            if first < last:
                yield at + first - start, place + first - low, last - first
            place += high - low
        at += stop - start


def _copied(out: Tensor, wanted: Piece, stored: Piece, file: Any, row: int, stored_row: int, count: int) -> int:
    """Copy a row range, for the columns that both pieces contain. Returns the number of elements copied."""
    if len(wanted.shape) == 1:
        out[row : row + count] = file[stored_row : stored_row + count]
        return count
    first, last = max(wanted.columns[0], stored.columns[0]), min(wanted.columns[1], stored.columns[1])
    if first >= last:
        return 0
    there = file[stored_row : stored_row + count, first - stored.columns[0] : last - stored.columns[0]]
    out[row : row + count, first - wanted.columns[0] : last - wanted.columns[0]] = there
    return there.numel()
