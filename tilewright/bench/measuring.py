"""The measuring process of `tilewright tune`, on the first GPU: `python -m tilewright.bench.measuring`.

Started by `tilewright.tune.measurer`; the protocol is described in `tilewright.tune.worker`.
"""

from collections.abc import Sequence
from typing import Any

from tilewright.bench.dims import find_op, parse_dims
from tilewright.op import Inputs
from tilewright.tune.ground import gpu_ground
from tilewright.tune.worker import serve

__all__ = ["main"]


def _arguments(op: Any, words: Sequence[str], seed: int) -> tuple[Any, ...]:
    return op.make(Inputs("cuda", seed, here=True), **parse_dims(op, words))


def main() -> None:
    """Measure the tasks that are read from stdin, until stdin ends."""
    serve(lambda: gpu_ground(find_op, _arguments))


if __name__ == "__main__":
    main()
