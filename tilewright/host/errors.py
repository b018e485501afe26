"""Errors for requests that cannot be answered. The server maps them to status codes."""

__all__ = ["Expired", "Failed", "HostError", "NotFound", "Overloaded", "Refused", "Unavailable"]


class HostError(Exception):
    """A request cannot be answered; the message is one sentence for the client."""

    retry_after_s: float | None = None

    def inside(self, what: str) -> "HostError":
        """The same error, with the name of the part in which it happened before its message."""
        found = type(self).__new__(type(self))
        Exception.__init__(found, f"{what}: {self}")
        found.retry_after_s = self.retry_after_s
        return found


class Refused(HostError):
    """The request is wrong; repeating it does not help."""


class NotFound(HostError):
    """There is no such model, or no such version of it."""


class Expired(HostError):
    """The request's deadline passed before it was started, so it was never computed."""


class Failed(HostError):
    """The model received the request but gave no answer."""


class Overloaded(HostError):
    """The queue is full."""

    def __init__(self, message: str, retry_after_s: float):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(HostError):
    """The model is temporarily unavailable: it is being loaded or replaced, or its circuit is open."""

    def __init__(self, message: str, retry_after_s: float = 1.0):
        super().__init__(message)
        self.retry_after_s = retry_after_s
