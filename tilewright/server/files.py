"""The limit on open files of this process. Each connection is one open file."""

import math
import os

try:
    import resource
except ImportError:  # Windows has no such limit
    resource = None

__all__ = ["connections_allowed", "files_free"]

SPARE_FILES = 64
"""Descriptors that are reserved for the rest of the process: the event loop, the web page's files, the device, the log."""


def files_free() -> float:
    """How many more files this process may open now; infinite if there is no limit."""
    if resource is None:
        return math.inf
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return math.inf if soft == resource.RLIM_INFINITY else soft - len(os.listdir("/dev/fd"))


def connections_allowed(wanted: int) -> int:
    """The number of connections that the process may have: `wanted`, or fewer because of the limit on open files.

    Raises the soft limit as far as needed and possible.

    Raises:
        ValueError: the limit leaves no room for even one connection.
    """
    if resource is None:
        return wanted
    used = len(os.listdir("/dev/fd")) + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < used + wanted:
        soft = used + wanted if hard == resource.RLIM_INFINITY else min(hard, used + wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return wanted
    if soft <= used:
        raise ValueError(
            f"this process may open only {soft} files, but needs {used} without any connection; raise the limit with "
            "`ulimit -n`"
        )
    return min(wanted, soft - used)
