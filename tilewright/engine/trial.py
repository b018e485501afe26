"""The first run of a chat template, in a separate process: it might loop for ever, or double a string until memory is full.

Jinja's sandbox denies a template access to Python and to the disk, but it does not limit processor time or memory. To make sure
that loading a model ends, a template is first tried on one short message in a child process, where time and memory are bounded.
Its result does not matter; it only has to end. A template that refuses the message is fine.
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
"""The child's exit code if it needs too much memory. A child that takes too long is ended by a signal."""
TRIAL_CPU_S = 1.0
TRIAL_WALL_S = 20.0
"""Larger than `TRIAL_CPU_S`, because the machine may be busy with other work."""
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

    If no child process can be started, the template is not tried, and a warning is logged.

    Raises:
        ChatTemplateError: it does not end within `TRIAL_CPU_S` seconds and `TRIAL_BYTES` bytes, or it fails with an unexpected
            error.
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
    """Run the template of a job. If it needs too much time or memory, exit with `EXHAUSTED`, or a signal ends the process."""
    try:
        import resource
    except ImportError:  # Windows: only the time is bounded
        pass
    else:
        signal.setitimer(signal.ITIMER_PROF, TRIAL_CPU_S)  # limits the processor time from here on; the signal ends the process
        resource.setrlimit(resource.RLIMIT_AS, (TRIAL_BYTES, TRIAL_BYTES))
    special = job["special"]
    assert isinstance(special, dict)
    try:
        ChatTemplate(str(job["source"]), special)([{"role": "user", "content": "Hello"}])
    except (ChatTemplateExhausted, MemoryError):
        sys.exit(EXHAUSTED)
    except (ValueError, RecursionError):
        pass  # it refuses the message, which is fine
