"""The program of one worker process: `python -m tilewright.rl.environments.worker SPEC MEMORY_BYTES`.

Requests and answers are lines of JSON: {"prompt", "data", "answer"} -> {"reward"}, and {"prompt", "data", "answers"} ->
{"reply"}. A failure is answered with {"error"}. Output that the environment prints goes to stderr. The memory limit applies to
the address space: an allocation beyond the limit raises MemoryError in the reward function.
"""

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

from tilewright.rl.environments.base import Environment, MultiTurn, Task
from tilewright.rl.environments.named import environment

__all__ = ["main"]


def main(spec: str, memory_bytes: int) -> None:
    """Answer requests until stdin ends."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    scorer = environment(spec)
    # Set the limit after the imports, because libraries reserve address space that they do not use.
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + memory_bytes, used + memory_bytes))
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(_answered(scorer, request)), file=replies, flush=True)


def _answered(scorer: Environment, request: dict[str, Any]) -> dict[str, Any]:
    task = Task(prompt=request["prompt"], data=request["data"])
    try:
        if "answer" in request:
            return {"reward": float(scorer.score(task, request["answer"]))}
        assert isinstance(scorer, MultiTurn)  # the trainer requests replies only from environments that have them
        said = scorer.reply(task, request["answers"])
        return {"reply": None if said is None else str(said)}
    except MemoryError:
        return {"error": "memory"}
    except Exception as error:  # noqa: BLE001 (whatever a user's reward raises costs its sample, and is counted)
        return {"error": "raised", "detail": f"{type(error).__name__}: {error}"[:500]}


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
