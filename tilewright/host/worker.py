"""The process of one instance of a model: it loads it, warms it up, and computes batches until it is told to end or killed.

Messages are JSON, one per packet. The first is {"config", "folder", "threads"}. While the model is loaded, each stage is sent
as {"stage": words}. Then follows {"signature", "bytes", "capacity", "most", "direct"} with the descriptors of one arena, or of
two and a second channel, or {"failed": sentence}. After that, each batch is {"parts": rows of each request, "inputs": [[offset,
shape], ...]}, in a packet with the number of its arena and what to read from clients' memory (intake.py). The answer is three
numbers of bytes (`Traffic`), the seconds that the batch took as eight bytes, and {"outputs": [[offset, datatype, shape], ...],
"errors": {request: sentence}, "unread": {request: sentence}, "bytes"}. Messages that occurred before are not parsed or written
again.

If "direct" is true, the process has its GPU copy large inputs in shared memory (direct.py). Their batch is then laid out on the
device, and what the processor has read is added to it there.

Batches are answered in the order in which they arrive; with two arenas, the second may arrive while the first is computed, and
begin before it is answered (turns.py). An arena contains the time until which its batch may begin. A batch that cannot begin in
time is answered by NOT_BEGUN only.

If a batch of several requests fails, each of them is computed alone, so that the input of one client does not cost the others
their answers. If the model returns a NaN for finite inputs, this is an error of that request, unless the config allows it. The
model's printed output goes to stderr.
"""

import json
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewright.host.arena import ALIGN, Arena, aligned
from tilewright.host.computing import Computing, sentence
from tilewright.host.config import ModelConfig
from tilewright.host.direct import MIN_BYTES, Copies, Direct
from tilewright.host.intake import MAX_PACKET, Intake
from tilewright.host.loaded import Loaded, load
from tilewright.host.regions import INLINE_BYTES
from tilewright.host.tensors import DATATYPES, byte_size
from tilewright.host.turns import Turns
from tilewright.hw.copies import HostCopies

__all__ = ["main"]

logger = logging.getLogger(__name__)

MAX_STAGED_BYTES = 1 << 30
"""Size of a batch's inputs above which there is no memory for a second batch, because on a GPU its pages are locked."""


def main(channel: socket.socket) -> None:
    """Serve one model over a socket that is connected to the server."""
    os.dup2(2, 1)

    def note(stage: str) -> None:
        _send(channel, {"stage": stage})

    first = json.loads(channel.recv(MAX_PACKET))
    config = ModelConfig.of(first["config"])
    try:
        torch.set_num_threads(first["threads"])
        loaded = load(config, None if first["folder"] is None else Path(first["folder"]), note)
        output_bytes = _warm_up(loaded, config, note)
        arenas, capacity = _arenas(loaded, config, output_bytes)
    except Exception as error:  # noqa: BLE001 (whatever a user's model raises while it loads is said, and ends the process)
        _send(channel, {"failed": sentence(error)})
        return
    for arena in arenas:
        arena.begin_by(capacity)
    places = [Computing(loaded, config, arena, capacity) for arena in arenas]
    direct = _direct(loaded, config, len(arenas), capacity)
    said = {"signature": loaded.signature.json(), "bytes": arenas[0].size, "capacity": capacity, "most": loaded.most}
    ahead = _ready(channel, {**said, "direct": direct is not None}, arenas)
    Turns(channel, Intake(channel, ahead, arenas, capacity, direct), places, direct).run()


def _copies(device: torch.device) -> Copies | None:
    """What copies from clients' memory to the device. Raises RuntimeError or OSError."""
    return HostCopies(device) if device.type == "cuda" else None


def _direct(loaded: Loaded, config: ModelConfig, arenas: int, capacity: int) -> Direct | None:
    """What has the GPU copy from clients' memory; None: there is no GPU, or the config or the system forbids it."""
    try:
        copies = _copies(loaded.device) if config.lock_regions and capacity >= MIN_BYTES else None
        return None if copies is None else Direct(copies, arenas, capacity)
    except (RuntimeError, OSError) as error:
        logger.warning("the processor copies tensors from shared memory: %s", error)
        return None


def _ready(channel: socket.socket, said: dict[str, Any], arenas: list[Arena]) -> socket.socket | None:
    """Send the server the arenas, and an end of a second channel if there are two; return the other end."""
    fds = [arena.fd for arena in arenas]
    if len(arenas) < 2:
        socket.send_fds(channel, [json.dumps(said).encode()], fds)
        return None
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        socket.send_fds(channel, [json.dumps(said).encode()], [*fds, theirs.fileno()])
    return ours


def _send(channel: socket.socket, message: dict[str, Any]) -> None:
    channel.send(json.dumps(message).encode())


def _warm_up(loaded: Loaded, config: ModelConfig, note: Callable[[str], None]) -> int:
    """Call the model with every padded batch size, so that it is warm for the first request.

    Returns the bytes of the largest outputs. An optimised model makes a graph for each new size.
    """
    largest = 0
    sizes = (loaded.buckets or (1, config.max_batch)) if loaded.signature.batched else (1,)
    doing = "optimising for" if loaded.optimised else "warming up"
    for number, rows in enumerate(sizes, 1):
        note(f"{doing} batch {rows} ({number} of {len(sizes)})")
        outputs = list[Tensor]()
        for _ in range(2):
            outputs = loaded.call([_zeros(spec.datatype, _closed(spec.shape, rows)) for spec in loaded.signature.inputs])
        largest = max(largest, sum(aligned(x.numel() * x.element_size()) for x in outputs))
    return largest


def _closed(shape: tuple[int, ...], rows: int) -> tuple[int, ...]:
    """A shape with `rows` for its first open dimension, and 8 for others."""
    return tuple((rows if at == 0 else 8) if n == -1 else n for at, n in enumerate(shape))


def _zeros(datatype: str, shape: tuple[int, ...]) -> Tensor:
    return torch.zeros(shape, dtype=getattr(torch, DATATYPES[datatype].torch))


def _arenas(loaded: Loaded, config: ModelConfig, output_bytes: int) -> tuple[list[Arena], int]:
    """(memory for the largest batch, or for two if writing the inputs takes long; the size of the inputs in bytes)."""
    inputs, rows = 0, max(config.max_batch, *loaded.buckets, 1)
    for spec in loaded.signature.inputs:
        inner = spec.shape[1:] if loaded.signature.batched else spec.shape
        fixed = byte_size(spec.datatype, inner) * (rows if loaded.signature.batched else 1)
        inputs += aligned(config.max_bytes if -1 in inner else fixed)
    staged = config.instances == 1 and INLINE_BYTES < inputs <= MAX_STAGED_BYTES
    return [Arena.create(inputs + ALIGN + output_bytes) for _ in range(1 + staged)], inputs
