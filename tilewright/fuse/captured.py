"""A graph for known shapes, ready to be called. On a GPU it is replayed as a CUDA graph, elsewhere it is called directly.

A CUDA graph reads its inputs from fixed tensors and writes its results to fixed tensors. So two calls must not overlap, even if
they come from different threads or streams. `Turns` ensures this with a lock for threads and an event for streams. In one turn,
inputs are copied in, the graph is replayed, and results are copied out. The stream of the next turn waits until the previous
turn has finished. A graph that is called directly needs no turns, because calls share no tensors that they write to.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, fx

from tilewright.fuse.structure import Structure, rebuild
from tilewright.kernels.launch.counters import own_tickets

__all__ = ["Captured", "Turns", "plainly", "share_weights"]

_WARM_UP = 2
"""Number of calls before the capture. In the first one kernels are compiled, and libraries choose their kernels."""


class Turns:
    """Makes the CUDA graphs of one model, which share memory, run one after the other.

    Args:
        device: the GPU.
        copies: whether results are copied out. If not, only the first calling thread may call the graphs, and results are
            valid until its next call.
    """

    def __init__(self, device: torch.device, copies: bool):
        self.device, self.copies = device, copies
        self.lock = threading.Lock()
        self.pool = torch.cuda.graph_pool_handle()
        self.done: torch.cuda.Event | None = None
        self.stream: torch.cuda.Stream | None = None
        self.owner: int | None = None

    def begin(self) -> torch.cuda.Stream:
        """Let the current stream wait for the end of the last turn. The caller holds the lock."""
        stream = torch.cuda.current_stream(self.device)
        if self.done is not None and stream != self.stream:
            stream.wait_event(self.done)
        if not self.copies:
            self._check_owner()
        return stream

    def end(self, stream: torch.cuda.Stream) -> None:
        """Record the end of the turn's work in the stream. The caller holds the lock."""
        if self.done is None:
            with torch.cuda.device(self.device):
                self.done = torch.cuda.Event()
        self.done.record(stream)
        self.stream = stream

    def _check_owner(self) -> None:
        me = threading.get_ident()
        self.owner = self.owner or me
        if self.owner != me:
            raise ValueError(
                "optimized model: it was made with copy_outputs=False, so each call overwrites the results of the one before, "
                "and another thread has already called it. Call it from one thread only, or optimise with copy_outputs=True"
            )


def plainly(device: torch.device) -> ExitStack:
    """A scope for calls, so that results do not depend on the caller's modes: no gradients, no autocast, no inference mode."""
    scope = ExitStack()
    scope.enter_context(torch.no_grad())
    if torch.is_inference_mode_enabled():
        scope.enter_context(torch.inference_mode(False))
        scope.enter_context(torch.no_grad())
    if torch.is_autocast_enabled(device.type):
        scope.enter_context(torch.autocast(device.type, enabled=False))
    return scope


class Captured:
    """A fused graph for inputs with the shapes of the example inputs.

    Args:
        fused: the graph: tensors -> a sequence of tensors.
        called: the function to call: the graph itself, or its compiled form.
        inputs: the tensors of the example inputs, in their own dtypes.
        outputs: dtypes of the float model's outputs.
        structure: the structure of the user's result.
        device: the device on which the graph runs.
        turns: on a GPU: a CUDA graph is captured, and replayed in these turns. None: the graph is called directly.
    """

    def __init__(
        self, fused: fx.GraphModule, called: Callable[..., Any], inputs: Sequence[Tensor], outputs: Sequence[torch.dtype],
        structure: Structure, device: torch.device, turns: Turns | None,
    ):  # fmt: skip
        self.fused, self.called, self.structure, self.device, self.turns = fused, called, structure, device, turns
        self.dtypes = list(outputs)
        self.layout = [(t.dtype, t.stride()) for t in inputs]
        self.constant = _constants(fused)
        self.single = len(self.dtypes) == 1 and structure.spec.is_leaf() and structure.leaves == (None,)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.given: list[Tensor] = []
        self.results: Sequence[Tensor] = ()
        if turns is not None:
            self._capture(inputs, turns)

    def _capture(self, inputs: Sequence[Tensor], turns: Turns) -> None:
        with torch.no_grad(), torch.cuda.device(self.device):
            self.given = [_static(t, n) for t, n in zip(inputs, _placeholders(self.fused), strict=True)]
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UP):
                    self.called(*self.given)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # thread_local: other threads may capture at the same time. The lock: no thread may replay a graph of this pool.
            capture = torch.cuda.graph(graph, pool=turns.pool, capture_error_mode="thread_local")
            with turns.lock, own_tickets(self.device) as self.tickets, capture:
                results = self.called(*self.given)
                # If results are not copied out, the CUDA graph includes their casts.
                self.results = results if turns.copies else self._own(results)
        self.graph = graph

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        """Run the graph on tensors with the shapes of the example inputs. Returns the result in the user's structure."""
        if self.graph is None or self.turns is None:
            with plainly(self.device):
                results = self.called(*map(_laid, tensors, self.layout))
                return rebuild(self.structure, self._own(results))
        with self.turns.lock:
            stream = self.turns.begin()
            try:
                for static, new in zip(self.given, tensors, strict=True):
                    # The user may overwrite host memory as soon as this call returns.
                    static.copy_(new, non_blocking=new.is_cuda)
                self.graph.replay()
                outputs = [r.to(d, copy=self.turns.copies) for r, d in zip(self.results, self.dtypes, strict=True)]
            finally:
                self.turns.end(stream)
        return outputs[0] if self.single else rebuild(self.structure, outputs)

    def _own(self, results: Sequence[Tensor]) -> list[Tensor]:
        """Results that the user may keep. A result that depends on parameters alone belongs to the graph, so it is copied."""
        each = zip(results, self.dtypes, self.constant, strict=True)
        return [r.to(d, copy=constant) for r, d, constant in each]


def share_weights(fused: fx.GraphModule, others: Iterable[fx.GraphModule]) -> None:
    """Replace a graph's constants by equal constants of the model's other graphs, so that all share one set of weights."""
    known: dict[Any, list[Tensor]] = {}
    for other in others:
        for held in (*other.buffers(), *other.parameters()):
            known.setdefault((held.shape, held.stride(), held.dtype), []).append(held)
    for module in fused.modules():
        for slots in (module._buffers, module._parameters):
            for name, own in slots.items():
                equal = [] if own is None else known.get((own.shape, own.stride(), own.dtype), [])
                slots[name] = next((held for held in equal if torch.equal(held, own)), own)  # pyright: ignore[reportArgumentType]


def _placeholders(fused: fx.GraphModule) -> list[fx.Node]:
    return [n for n in fused.graph.nodes if n.op == "placeholder"]


def _laid(value: Tensor, layout: tuple[torch.dtype, tuple[int, ...]]) -> Tensor:
    """A tensor with the example's dtype and strides, aligned to 16 bytes. The launches were chosen for such tensors."""
    dtype, stride = layout
    if value.stride() == stride and value.dtype == dtype and value.data_ptr() % 16 == 0:
        return value
    if 0 in stride:  # elements share memory, so such a tensor cannot be written to
        return value.to(dtype, copy=True, memory_format=torch.contiguous_format)
    return torch.empty_strided(value.shape, stride, dtype=dtype, device=value.device).copy_(value)


def _constants(fused: fx.GraphModule) -> list[bool]:
    """Which outputs of a graph are constants."""
    outputs: Any = next(n for n in fused.graph.nodes if n.op == "output").args[0]
    return [isinstance(n, fx.Node) and n.op == "get_attr" for n in outputs]


def _static(value: Tensor, node: fx.Node) -> Tensor:
    """A fixed tensor for an input, in the dtype and layout to which the graph's first call converts inputs.

    This call then has nothing to do.
    """
    first = next((user for user in node.users if user.op == "call_function"), None)
    return value.clone() if first is None else first.target(value, *first.args[1:]).clone()  # pyright: ignore[reportCallIssue]
