"""A chat template's first run, in a process of its own: it may loop for ever, or double a string until memory is full.

Jinja's sandbox keeps a template from Python and from the disk, not from the processor. So that loading a model ends, a template
is tried once on a short message where time and memory can be bounded: in a child process. What the template answers does not
matter here, only that it answers; a template that refuses the message is fine.
"""

import json
import logging
import signal
import subprocess
import sys
from collections.abc import Mapping

from tilewright.engine.chat import ChatTemplate, ChatTemplateError, ChatTemplateExhausted

__all__ = ["child", "try_template"]

EXHAUSTED = 3
"""The child's exit code when memory was not enough; a child that took too long is ended by a signal."""
TRIAL_CPU_S = 1.0
TRIAL_WALL_S = 20.0
"""On a machine that is busy with other things."""
TRIAL_BYTES = 512 << 20
logger = logging.getLogger(__name__)

_CHILD = """
import json, sys
job = json.load(sys.stdin)
sys.path[:] = job["path"]
from tilewright.engine.trial import child
child(job)
"""


def try_template(source: str, special_tokens: Mapping[str, str]) -> None:
    """Run a template on one short message.

    Where no child process can be started, the template is not tried, and the log says so.

    Raises:
        ChatTemplateError: it does not come to an end in `TRIAL_CPU_S` seconds and `TRIAL_BYTES` bytes, or it fails in a way
            that templates should not.
    """
    job = json.dumps({"path": sys.path, "source": source, "special": dict(special_tokens)})
    command = [sys.executable, "-c", _CHILD]
    try:
        done = subprocess.run(command, input=job, capture_output=True, text=True, timeout=TRIAL_WALL_S, check=False)
    except subprocess.TimeoutExpired:
        done = None
    except OSError as error:
        logger.warning("the chat template was not tried, as no Python could be started: %s", error)
        return
    if done is None or done.returncode < 0 or done.returncode == EXHAUSTED:
        raise ChatTemplateError(
            f"the model's chat template does not come to an end on one short message, in a second and "
            f"{TRIAL_BYTES >> 20} MiB; download the model again, or remove the template"
        )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ChatTemplateError(f"the model's chat template could not be tried: {last[:300]}")


def child(job: Mapping[str, object]) -> None:
    """Run the template of a job; ends with an exit code other than 0 where it takes too much."""
    try:
        import resource
    except ImportError:  # Windows: the time alone is bounded
        pass
    else:
        signal.setitimer(signal.ITIMER_PROF, TRIAL_CPU_S)  # of processor time, from here on; its signal ends the process
        resource.setrlimit(resource.RLIMIT_AS, (TRIAL_BYTES, TRIAL_BYTES))
    special = job["special"]
    assert isinstance(special, dict)
    try:
        ChatTemplate(str(job["source"]), special)([{"role": "user", "content": "Hello"}])
    except (ChatTemplateExhausted, MemoryError):
        sys.exit(EXHAUSTED)
    except (ValueError, RecursionError):
        pass  # it refuses the message, which is an answer
