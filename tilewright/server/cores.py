"""How a language model's engine and its HTTP share the cores of a machine: in which processes, and with how many threads.

On a CPU the engine's small operations and HTTP compete twice. In one process they compete for the interpreter's lock: an
operation that has ended waits until the event loop gives the lock back. And with as many threads as cores, each operation ends
only when its slowest thread does, which may have to wait for a core that HTTP uses. So HTTP gets a process of its own, and,
beside a small model, a core of its own. Measured: docs/experiments/server-cores.md
"""

from typing import TYPE_CHECKING

from tilewright.hw.cpu import cpu
from tilewright.hw.env import threads_chosen
from tilewright.server.config import ServerConfig

if TYPE_CHECKING:
    from tilewright.engine.config import EngineConfig
    from tilewright.engine.llm import LLM

__all__ = ["fronts_of", "share_cores"]

SMALL_BYTES = 64 << 20
"""Largest size of the weights of a small model. A larger model gains more from the last core than HTTP would: it answers few
requests per second, so HTTP needs little time."""


def fronts_of(config: ServerConfig, engine: "EngineConfig | None", *, beside: bool) -> int:
    """Return the number of front processes.

    Args:
        config: if its `fronts` is set, that number is returned.
        engine: config of the language model's engine; None: there is no language model.
        beside: whether the same server also serves ordinary models.
    """
    if config.fronts is not None:
        return config.fronts
    several = config.ray or config.replicas > 1 or (engine is not None and engine.plan.ranks > 1)
    return int(engine is not None and not (beside or several or config.shared_memory) and cpu().cores > 1)


def share_cores(llm: "LLM") -> None:
    """Leave one core to HTTP if the model is small and runs on the CPU; do nothing if the user chose the number of threads."""
    if llm.plan is None or llm.engine.runner.asynchronous or threads_chosen():
        return
    if llm.plan.weights_bytes <= SMALL_BYTES:
        import torch

        torch.set_num_threads(max(1, min(torch.get_num_threads(), cpu().cores - 1)))
