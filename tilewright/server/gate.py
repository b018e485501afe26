"""The checks that a request has to pass before it reaches an endpoint.

| request                                                | answer                                            |
|--------------------------------------------------------|---------------------------------------------------|
| with Content-Length and Transfer-Encoding              | 400, and the connection is closed (smuggling)     |
| to a keyless local server, under a foreign host name   | 403 (DNS rebinding)                               |
| a POST that a foreign web page sends (`Origin`)        | 403, unless `cors_origins` names that origin      |
| without the API key, where one is set                  | 401, counted in /metrics                          |
"""

import hmac
import re
from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from tilewright.server.access import Access
from tilewright.server.config import ServerConfig
from tilewright.server.errors import ApiError
from tilewright.server.metrics import HttpCounts
from tilewright.server.spans import tracer_of

__all__ = ["Gate", "install_gates"]

OPEN_PATHS = {"/", "/health", "/ready", "/version"}
"""Paths that need no key. Those under /page/ need none either."""
LOCAL_HOST = re.compile(r"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d+)?", re.IGNORECASE)
SAFE_METHODS = {"GET", "HEAD", "OPTIONS"}


class Gate:
    """ASGI middleware that refuses requests which fail a check."""

    def __init__(self, app: ASGIApp, config: ServerConfig, counts: HttpCounts):
        self._app = app
        self._counts = counts
        self._key = None if config.api_key is None else config.api_key.encode()
        self._local_only = config.loopback and self._key is None
        self._origins = {origin.lower() for origin in config.cors_origins or ()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        refusal = None
        if scope["type"] == "http":
            refusal = self.refusal(scope["method"], scope["path"], Headers(scope=scope))
        await (self._app if refusal is None else refusal.response())(scope, receive, send)

    def refusal(self, method: str, path: str, headers: Headers, *, counted: bool = True) -> ApiError | None:
        """Why a request is refused; None: it may pass. With `counted=False` a wrong key is not counted in /metrics."""
        refusal = _two_lengths(headers) or self._wrong_host(headers) or self._foreign_page(method, headers)
        return refusal or self._no_key(path, headers, counted)

    def _wrong_host(self, headers: Headers) -> ApiError | None:
        host = headers.get("host", "")
        if not self._local_only or LOCAL_HOST.fullmatch(host):
            return None
        hint = "set an API key or another --host to allow other names"
        return ApiError(403, f"this server answers only requests to localhost, not to {host[:80]!r}; {hint}", code="wrong_host")

    def _foreign_page(self, method: str, headers: Headers) -> ApiError | None:
        origin = headers.get("origin")
        if origin is None or method in SAFE_METHODS or origin.lower() in self._origins:
            return None
        if _same(origin, headers.get("host", "")):
            return None
        message = f"web pages of {origin[:80]!r} may not use this server; allow them with --cors-origin"
        return ApiError(403, message, code="foreign_origin")

    def _no_key(self, path: str, headers: Headers, counted: bool) -> ApiError | None:
        if self._key is None or path in OPEN_PATHS or path.startswith("/page/"):
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self._key):
            return None
        self._counts.wrong_keys += counted
        got = "a wrong key" if given else "none"
        message = (
            f"Incorrect API key: got {got}, wanted 'Authorization: Bearer <key>' with the key this server was started with"
        )
        return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


def install_gates(app: Starlette, config: ServerConfig, counts: HttpCounts, exposed: Sequence[str] = ()) -> None:
    """Wrap an app in the middleware that every request passes: the access log, the CORS rules, and `Gate`.

    `exposed`: further response headers that web pages of other origins may read. Raises MissingExtra if the config sets
    `traces` and OpenTelemetry is not installed.
    """
    app.add_middleware(Gate, config=config, counts=counts)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "x-tilewright-ignored", "retry-after", *exposed],
        )
    counts.tracer = tracer_of(config)
    app.add_middleware(Access, counts=counts)


def _two_lengths(headers: Headers) -> ApiError | None:
    """Refuse a request with both lengths: a proxy may use the other one and treat a part of this body as the next request."""
    if "content-length" not in headers or "transfer-encoding" not in headers:
        return None
    message = "the request has both Content-Length and Transfer-Encoding, wanted only one of them"
    return ApiError(400, message, code="invalid_http", headers={"connection": "close"})


def _same(origin: str, host: str) -> bool:
    """Whether a page of `origin` came from the server `host`. The scheme may differ, because a proxy may change it."""
    scheme, _, name = origin.lower().partition("://")
    return scheme in ("http", "https") and name == host.lower()
