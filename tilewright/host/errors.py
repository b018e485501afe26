"""Errors for requests that cannot be answered. The server maps them to status codes."""

__all__ = ["Expired", "Failed", "HostError", "NotFound", "Overloaded", "Refused", "Unavailable"]


class HostError(Exception):
    """One sentence for the client."""

    retry_after_s: float | None = None

    def inside(self, what: str) -> "HostError":
        """The same, said of something that it happened in."""
        found = type(self).__new__(type(self))
        Exception.__init__(found, f"{what}: {self}")
        found.retry_after_s = self.retry_after_s
        return found


class Refused(HostError):
    """The request is wrong, and will be wrong again."""


class NotFound(HostError):
    """No such model, or version of it."""


class Expired(HostError):
    """Its deadline passed before it was started: it was never computed."""


class Failed(HostError):
    """The model had it, and gave no answer."""


class Overloaded(HostError):
    """The queue is full."""

    def __init__(self, message: str, retry_after_s: float):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(HostError):
    """The model is not there now: it loads, is replaced, or its circuit is open."""

    def __init__(self, message: str, retry_after_s: float = 1.0):
        super().__init__(message)
        self.retry_after_s = retry_after_s
