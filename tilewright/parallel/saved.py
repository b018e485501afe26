"""Converts the state of a run to and from whole tensors with the names of the whole model, independent of the plan."""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tilewright.parallel.pieces import Piece
from tilewright.parallel.ranks import Ranks

__all__ = ["gathered", "named", "read_pieces"]


def gathered(tensors: Mapping[str, Tensor], pieces: Mapping[str, Piece], world: Ranks) -> dict[str, Tensor]:
    """Assemble the pieces of all ranks: on rank 0 the whole tensors, on the CPU; on other ranks an empty dict.

    Args:
        tensors: "<state>.<parameter here>" -> the state of this rank's piece. Tensors that do not belong to a parameter are
            taken from rank 0.
        pieces: name of a parameter here -> its piece.
    """
    own = dict(named(tensors, pieces))
    lists = [json.loads(text) for text in world.texts(json.dumps([_entry(*entry) for entry in own.values()]))]
    keys, found, seen = list(own), {}, set[str]()
    for rank, entries in enumerate(lists):
        for index, entry in enumerate(entries):
            what = json.dumps([entry["key"], entry["piece"]])
            if what in seen:
                continue
            seen.add(what)
            tensor = own[keys[index]][2] if rank == world.rank else None
            if world.rank == 0 and rank != 0:
                tensor = torch.empty(
                    entry["size"], dtype=getattr(torch, entry["dtype"]), device=next(iter(tensors.values())).device
                )
                dist.recv(tensor, src=rank, group=world.group)
            elif world.rank == rank != 0:
                assert tensor is not None
                dist.send(tensor.contiguous(), dst=0, group=world.group)
            if world.rank == 0 and tensor is not None:
                _place(found, entry, tensor)
    return (
        {**found, **{n: t.detach().to("cpu", copy=True) for n, t in tensors.items() if n not in own}} if world.rank == 0 else {}
    )


def named(tensors: Mapping[str, Tensor], pieces: Mapping[str, Piece]) -> Iterator[tuple[str, tuple[str, Piece, Tensor]]]:
    """(name here, (name in the file, piece, tensor)) of each tensor that belongs to a parameter."""
    for name, tensor in tensors.items():
        words = name.split(".")
        for cut in range(1, len(words)):
            if (piece := pieces.get(".".join(words[cut:]))) is not None:
                yield name, (".".join([*words[:cut], piece.of]), piece, tensor)
                break


def _entry(key: str, piece: Piece, tensor: Tensor) -> dict[str, Any]:
    return {
        "key": key, "piece": piece.table(), "size": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch."),
    }  # fmt: skip


def _place(found: dict[str, Tensor], entry: dict[str, Any], tensor: Tensor) -> None:
    piece, key = Piece.of_table(entry["piece"]), entry["key"]
    if piece.is_whole:
        found[key] = tensor.detach().to("cpu", copy=True)
        return
    if key not in found:
        found[key] = torch.zeros(piece.shape, dtype=tensor.dtype)
    piece.paste(tensor.detach().cpu(), found[key])


def read_pieces(folder: Path, wanted: Mapping[str, Tensor], pieces: Mapping[str, Piece]) -> dict[str, Tensor]:
    """This rank's pieces of the tensors in a folder's safetensors files: on the CPU, with the names of `wanted`.

    Raises:
        ValueError: a tensor is missing, is damaged, or has the wrong shape.
    """
    known = dict(named(wanted, pieces))
    found: dict[str, Tensor] = {}
    try:
        with ExitStack() as stack:
            files = [stack.enter_context(safe_open(path, framework="pt")) for path in sorted(folder.glob("*.safetensors"))]
            home = {key: file for file in files for key in file.keys()}  # noqa: SIM118 (not a mapping)
            for name, tensor in wanted.items():
                key, piece = known[name][:2] if name in known else (name, None)
                if key not in home:
                    raise ValueError(f"{key} is missing")
                if piece is None or piece.is_whole:
                    found[name] = home[key].get_tensor(key)
                else:
                    whole = home[key].get_slice(key)
                    if tuple(whole.get_shape()) != piece.shape:
                        raise ValueError(f"{key} has shape {whole.get_shape()}, wanted {list(piece.shape)}")
                    found[name] = piece.cut(whole)
                if found[name].shape != tensor.shape:
                    raise ValueError(f"{key} has shape {list(found[name].shape)}, wanted {list(tensor.shape)}")
    except (OSError, SafetensorError, ValueError) as error:
        raise ValueError(
            f"{folder} cannot be read ({str(error)[:300]}); remove it to continue from the checkpoint before it"
        ) from error
    return found
