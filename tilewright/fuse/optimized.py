"""What `optimize` returns: a module that is called as the user's was, and replays one CUDA graph on a GPU.

Inputs are copied into tensors of the graph's own (which also casts them and brings images to channels-last), outputs are copied
out, in the dtype that the float model gives. So results stay what they are when the next call comes; `copy_outputs=False` of
`optimize` leaves that copy out.

Refuses: gradients, other shapes than the example's, calls from several threads at once.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from tilewright.fuse.report import Report
from tilewright.fuse.trace import Traced
from tilewright.kernels.workspace import own_tickets

__all__ = ["Optimized"]

_WARM_UP = 2
"""Calls before the capture: the first one compiles kernels and lets libraries choose theirs."""


class Optimized(nn.Module):
    """The user's model on our operators.

    Args:
        fused: flat inputs -> flat outputs, as a graph.
        called: the same, as it is called: the graph itself, or compiled.
        traced: of the float model: how inputs and outputs are structured.
        inputs: examples, flat, as the user gave them.
        outputs: dtypes of the float model's outputs, None for what is no tensor.
        report: what was decided.
        graph: whether to capture a CUDA graph.
        copy_outputs: see the module's docstring.
    """

    report: Report

    def __init__(
        self, fused: nn.Module, called: Callable[..., Any], traced: Traced, inputs: Sequence[Any],
        outputs: Sequence[torch.dtype | None], report: Report, *, graph: bool, copy_outputs: bool = True,
    ):  # fmt: skip
        super().__init__()
        self.fused, self.report = fused, report
        self.called = called
        self.in_spec, self.out_spec = traced.in_spec, traced.out_spec
        self.wanted = [(i.shape, i.device) if isinstance(i, Tensor) else (i, None) for i in inputs]
        self.dtypes, self.copies = list(outputs), copy_outputs
        self.strides = [i.stride() if isinstance(i, Tensor) else None for i in inputs]
        self.names = list(pytree.tree_unflatten(list(inputs), self.in_spec)[1])
        self.constant = _constants(fused, len(self.dtypes))
        self.captured: torch.cuda.CUDAGraph | None = None
        self.given: list[Any] = []
        self.results: Sequence[Any] = ()
        # Tensors alone, by position, and one tensor back: the call that batch 1 makes, without going through structures.
        plain = pytree.tree_structure((tuple(inputs), {}))
        self.simple = plain == self.in_spec and all(isinstance(i, Tensor) for i in inputs)
        self.single = self.out_spec == pytree.tree_structure(torch.empty(0)) and outputs[0] is not None
        self.eval()
        if graph:
            self._capture(inputs)

    def _capture(self, inputs: Sequence[Any]) -> None:
        with torch.no_grad():
            self.given = [_static(i, n) for i, n in zip(inputs, _placeholders(self.fused), strict=True)]
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UP):
                    self.called(*self.given)
            torch.cuda.current_stream().wait_stream(stream)
            captured = torch.cuda.CUDAGraph()
            device = next(i.device for i in self.given if isinstance(i, Tensor))
            with own_tickets(device) as self.tickets, torch.cuda.graph(captured):
                results = self.called(*self.given)
                # Where nothing is copied out, the cast is a launch of the graph's.
                self.results = results if self.copies else self._own(results)
        self.captured = captured

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The user's call.

        Raises:
            ValueError: another structure, shape or device than the example's, or a gradient is asked for.
        """
        flat = args if self.simple and not kwargs and self._fit(args) else self._flat(args, kwargs)
        if self.captured is None:
            with torch.no_grad():
                results = self.called(*map(_laid, flat, self.strides))
                return pytree.tree_unflatten(self._own(results), self.out_spec)
        # Nothing here asks for a gradient, so there is none to switch off.
        for static, new in zip(self.given, flat, strict=True):
            if isinstance(static, Tensor):
                static.copy_(new, non_blocking=True)
        self.captured.replay()
        if self.single:
            return self._out(self.results[0], self.dtypes[0])
        outputs = [self._out(r, d) for r, d in zip(self.results, self.dtypes, strict=True)]
        return pytree.tree_unflatten(outputs, self.out_spec)

    def _fit(self, args: tuple[Any, ...]) -> bool:
        """Whether the arguments are tensors as the examples were; what is wrong otherwise, `_flat` says."""
        if len(args) != len(self.wanted):
            return False
        return all(
            type(new) is Tensor and new.shape == shape and new.device == device and not new.requires_grad
            for new, (shape, device) in zip(args, self.wanted, strict=True)
        )

    def _out(self, result: Any, dtype: torch.dtype | None) -> Any:
        if dtype is None or not isinstance(result, Tensor):
            return result
        return result.to(dtype, copy=self.copies)

    def _own(self, results: Sequence[Any]) -> list[Any]:
        """Results as the user may have them: what depends on parameters alone is the graph's, and is copied."""
        each = zip(results, self.dtypes, self.constant, strict=True)
        return [r if d is None else r.to(d, copy=constant) for r, d, constant in each]

    def _flat(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        kwargs = {name: kwargs[name] for name in (*self.names, *kwargs) if name in kwargs}
        flat, spec = pytree.tree_flatten((args, kwargs))
        if spec != self.in_spec:
            raise ValueError(f"optimized model: called with the structure {spec}; it was optimised for {self.in_spec}")
        for at, (new, (wanted, device)) in enumerate(zip(flat, self.wanted, strict=True)):
            if device is None:
                if isinstance(new, Tensor) or new != wanted:
                    raise ValueError(
                        f"optimized model: input {at} is {new!r}; it was optimised for {wanted!r}, which is part of its graph: "
                        "optimise once more for this value"
                    )
            elif not isinstance(new, Tensor) or new.shape != wanted:
                got = list(new.shape) if isinstance(new, Tensor) else repr(new)
                raise ValueError(
                    f"optimized model: input {at} is {got}; it was optimised for {list(wanted)}: pad or split the batch to "
                    "that, or call optimize once more with an example of this shape"
                )
            elif new.device != device and self.captured is None:
                raise ValueError(f"optimized model: input {at} is on {new.device}, and was optimised for {device}: move it")
            elif new.requires_grad and torch.is_grad_enabled():
                raise ValueError(
                    f"optimized model: input {at} asks for a gradient, and an optimised model is for inference only: call it "
                    "under torch.no_grad(), or train the model that it came from"
                )
        return flat


def _placeholders(fused: nn.Module) -> list[fx.Node | None]:
    graph = getattr(fused, "graph", None)
    return [] if graph is None else [n for n in graph.nodes if n.op == "placeholder"]


def _laid(value: Any, stride: tuple[int, ...] | None) -> Any:
    """A tensor in memory as the example was, at 16 bytes and with its strides: launches were chosen for such."""
    if stride is None or (value.stride() == stride and value.data_ptr() % 16 == 0):
        return value
    if 0 in stride:  # of numbers that share their memory nothing can be written
        return value.clone(memory_format=torch.contiguous_format)
    return torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device).copy_(value)


def _constants(fused: nn.Module, count: int) -> list[bool]:
    """Which outputs of a graph are tensors that it holds."""
    graph = getattr(fused, "graph", None)
    outputs = [None] * count if graph is None else next(n for n in graph.nodes if n.op == "output").args[0]
    return [isinstance(n, fx.Node) and n.op == "get_attr" for n in outputs]


def _static(value: Any, node: fx.Node | None) -> Any:
    """A tensor of the graph's own for an input, as the graph's first call wants it: that call then does nothing."""
    if not isinstance(value, Tensor):
        return value
    first = next((user for user in node.users if user.op == "call_function"), None) if node is not None else None
    return value.clone() if first is None else first.target(value, *first.args[1:]).clone()  # pyright: ignore[reportCallIssue]
