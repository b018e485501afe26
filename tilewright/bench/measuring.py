"""The measuring process of `tilewright tune`, on the first GPU: `python -m tilewright.bench.measuring`.

Started and spoken to by `tilewright.tune.measurer`; what is said is in `tilewright.tune.worker`.
"""

from collections.abc import Sequence
from typing import Any

import torch

from tilewright.bench.dims import find_op, parse_dims
from tilewright.hw.device import cuda_count, device_of
from tilewright.hw.nvml import NoDriver, clocks_mhz
from tilewright.op import Inputs
from tilewright.tune.measure import POLICY, Stopwatch
from tilewright.tune.record import Environment, versions
from tilewright.tune.worker import Ground, serve

__all__ = ["main"]


def _arguments(op: Any, words: Sequence[str], seed: int) -> tuple[Any, ...]:
    return op.make(Inputs("cuda", seed, here=True), **parse_dims(op, words))


def _clocks() -> str:
    try:
        found = clocks_mhz(0)
    except NoDriver:
        return "unknown"
    most = {name: found[f"{name}_max"] for name in ("sm", "memory") if f"{name}_max" in found}
    return ", ".join(f"{name} at most {mhz} MHz" for name, mhz in most.items()) or "unknown"


def _ground() -> Ground:
    if not cuda_count():
        raise RuntimeError("there is no GPU that torch can use")
    device = device_of(0)
    return Ground(
        op=find_op,
        arguments=_arguments,
        timer=Stopwatch(),
        environment=Environment(card=device.name, sms=device.sms, clocks=_clocks(), policy=POLICY, **versions()),
        l2_bytes=device.l2_bytes,
        synchronise=torch.cuda.synchronize,
    )


def main() -> None:
    """Measure what comes on stdin until it ends."""
    serve(_ground)


if __name__ == "__main__":
    main()
