"""A chat template's first run, in a process of its own: it may loop for ever, or double a string until memory is full.

Jinja's sandbox keeps a template from Python and from the disk, not from the processor. So that loading a model ends, a template
is tried once on a short message where time and memory can be bounded: in a child process. What the template answers does not
matter here, only that it answers; a template that refuses the message is fine.
"""

import json
import math
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress

from tilewright.engine.chat import ChatTemplate, ChatTemplateError

__all__ = ["child", "try_template"]

TRIAL_CPU_S = 1
TRIAL_WALL_S = 20.0
"""On a machine that is busy with other things."""
TRIAL_BYTES = 512 << 20
_CHILD = """
import json, sys
job = json.load(sys.stdin)
sys.path[:] = job["path"]
from tilewright.engine.trial import child
child(job)
"""


def try_template(source: str, special_tokens: Mapping[str, str]) -> None:
    """Run a template on one short message.

    Raises:
        ChatTemplateError: it does not come to an end in `TRIAL_CPU_S` seconds and `TRIAL_BYTES` bytes.
    """
    job = json.dumps({"path": sys.path, "source": source, "special": dict(special_tokens)})
    command = [sys.executable, "-c", _CHILD]
    try:
        done = subprocess.run(command, input=job, capture_output=True, text=True, timeout=TRIAL_WALL_S, check=False)
    except subprocess.TimeoutExpired:
        done = None
    if done is None or done.returncode != 0:
        raise ChatTemplateError(
            f"the model's chat template does not come to an end on one short message, in a second and "
            f"{TRIAL_BYTES >> 20} MiB; download the model again, or remove the template"
        )


def child(job: Mapping[str, object]) -> None:
    """Run the template of a job; ends with an exit code other than 0 where it takes too much."""
    try:
        import resource
    except ImportError:  # Windows: the time alone is bounded
        pass
    else:
        limit_s = math.ceil(time.process_time()) + TRIAL_CPU_S  # the start of the process does not count
        resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))
        resource.setrlimit(resource.RLIMIT_AS, (TRIAL_BYTES, TRIAL_BYTES))
    special = job["special"]
    assert isinstance(special, dict)
    with suppress(ValueError, RecursionError):  # it refuses the message, which is an answer
        ChatTemplate(str(job["source"]), special)([{"role": "user", "content": "Hello"}])
