"""Pipelines: several models connected as an acyclic graph. The output of one under a name is the input of others by that name.

A step runs as soon as its inputs are available, concurrently with others. Names that no step produces are inputs of the
pipeline; names that no step consumes are its outputs. Datatypes and shapes are those of the models' signatures.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from tilewright.host.config import Step
from tilewright.host.errors import HostError
from tilewright.host.tensors import Signature, TensorSpec, Wire, checked
from tilewright.host.version import Ask

__all__ = ["Pipeline", "signature_of"]

Call = Callable[[str, Mapping[str, Wire], Ask], Awaitable[Mapping[str, Wire]]]
"""(model, its inputs, the request's other options) -> its outputs."""
MAX_STEPS = 64


def signature_of(steps: Sequence[Step], signatures: Mapping[str, Signature]) -> Signature:
    """The signature of a pipeline.

    Raises:
        ValueError: there is a cycle, two steps produce the same name, a model is not loaded, or names do not fit.
    """
    if len(steps) > MAX_STEPS:
        raise ValueError(f"the pipeline has {len(steps)} steps, wanted at most {MAX_STEPS}")
    given, taken = dict[str, TensorSpec](), dict[str, TensorSpec]()
    for step in steps:
        if step.model not in signatures:
            raise ValueError(f"the pipeline names the model {step.model!r}, which is not loaded")
        own = signatures[step.model]
        sides = (("input", own.inputs, step.inputs), ("output", own.outputs, step.outputs))
        for side, specs, names in sides:
            known = {spec.name for spec in specs}
            wrong = [name for name in names if name not in known] or [n for n in known if side == "input" and n not in names]
            if wrong:
                raise ValueError(
                    f"the step of {step.model} and the model's {side}s differ in {wrong[0]!r}; it has {sorted(known)}"
                )
        for spec in own.inputs:
            taken.setdefault(step.inputs[spec.name], spec._replace(name=step.inputs[spec.name]))
        for spec in own.outputs:
            name = step.outputs.get(spec.name)
            if name in given:
                raise ValueError(f"two steps of the pipeline produce {name!r}")
            if name is not None:
                given[name] = spec._replace(name=name)
    _ordered(steps, {name for name in taken if name not in given})
    inputs = tuple(spec for name, spec in taken.items() if name not in given)
    outputs = tuple(spec for name, spec in given.items() if name not in taken)
    if not inputs or not outputs:
        raise ValueError("the pipeline has no input, or no output")
    return Signature(inputs, outputs, all(signatures[step.model].batched for step in steps))


def _ordered(steps: Sequence[Step], there: set[str]) -> None:
    """Raise ValueError unless the steps can run one after the other, starting with the names in `there`."""
    left = list(steps)
    while left:
        ready = [step for step in left if all(name in there for name in step.inputs.values())]
        if not ready:
            waits = ", ".join(step.model for step in left)
            raise ValueError(f"the pipeline's steps wait for one another: {waits}")
        there |= {name for step in ready for name in step.outputs.values()}
        left = [step for step in left if step not in ready]


class Pipeline:
    """A pipeline that is served like a model."""

    def __init__(self, name: str, steps: Sequence[Step], signature: Signature, call: Call, max_rows: int):
        self.name, self.signature = name, signature
        self._steps, self._call, self._max_rows = tuple(steps), call, max_rows

    async def infer(self, inputs: Mapping[str, Wire], ask: Ask) -> tuple[Wire, ...]:
        """The outputs for these inputs. Raises the HostError of the first step that fails; the other steps are cancelled."""
        checked(self.name, self.signature, inputs, self._max_rows)
        loop = asyncio.get_running_loop()
        names = {name for step in self._steps for name in (*step.inputs.values(), *step.outputs.values())}
        tensors: dict[str, asyncio.Future[Wire]] = {name: loop.create_future() for name in names}
        for name, wire in inputs.items():
            tensors[name].set_result(wire)

        async def run(step: Step) -> None:
            own = {name: await asyncio.shield(tensors[of]) for name, of in step.inputs.items()}
            found = await self._call(step.model, own, ask)
            for name, to in step.outputs.items():
                tensors[to].set_result(found[name])

        tasks = [loop.create_task(run(step)) for step in self._steps]
        try:
            await asyncio.gather(*tasks)
        except HostError as error:
            raise type(error)(
                *([f"pipeline {self.name}: {error}"] + ([error.retry_after_s] if error.retry_after_s else []))
            ) from None
        finally:
            for task in tasks:
                task.cancel()
        return tuple(tensors[spec.name].result() for spec in self.signature.outputs)
