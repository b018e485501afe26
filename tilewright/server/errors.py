"""Errors in the format of the OpenAI API: `{"error": {"message", "type", "param", "code"}}` with a status code.

The status decides which typed exception a client raises (400 BadRequestError, 401 AuthenticationError, 404 NotFoundError,
429 RateLimitError, 5xx InternalServerError), so it is chosen here, once, by the constructors below.
"""

import math
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

__all__ = ["ApiError", "bad_request", "install", "not_supported", "overloaded", "unavailable"]


class ApiError(Exception):
    """An error to be sent to the client. `type` and `code` are OpenAI's terms; `param` is the name of the wrong field."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        self.body: dict[str, Any] = {"error": {"message": message, "type": type, "param": param, "code": code}}

    def response(self) -> JSONResponse:
        """The error as an HTTP response."""
        return JSONResponse(self.body, self.status, headers=self.headers)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request itself is wrong, so sending it again will not help."""
    return ApiError(400, message, param=param, code=code)


def not_supported(param: str, wanted: str) -> ApiError:
    """400: the request has a field or value that would change the result and that this server does not implement."""
    return bad_request(f"{param} is not supported yet: {wanted}", param=param, code="unsupported_parameter")


def overloaded(message: str, retry_after_s: float) -> ApiError:
    """429: the queue is full; the same request may succeed later."""
    retry_after = {"retry-after": str(math.ceil(retry_after_s))}
    return ApiError(429, message, type="rate_limit_error", code="queue_full", headers=retry_after)


def unavailable(message: str, code: str = "unavailable") -> ApiError:
    """503: the server is draining or its engine has stopped."""
    return ApiError(503, message, type="service_unavailable", code=code, headers={"retry-after": "1"})


def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    words = {
        404: f"there is no path {request.method} {request.url.path}; the API is under /v1, see GET /v1/models",
        405: f"{request.method} is not allowed on {request.url.path}",
    }
    message = words.get(error.status_code, str(error.detail))
    return ApiError(error.status_code, message, headers=error.headers).response()


def _bug(request: Request, error: Exception) -> Response:
    # Starlette logs the traceback after this answer is sent. The client gets no internal details.
    message = "the server failed on this request; its log has the traceback"
    # This answer bypasses the middleware that would add the id.
    headers = {"x-request-id": request.scope.get("request_id", "")}
    return ApiError(500, message, type="server_error", code="internal_error", headers=headers).response()


def install(app: FastAPI) -> None:
    """Make `app` answer every error, including those of the framework, as an OpenAI error object."""
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _bug)
