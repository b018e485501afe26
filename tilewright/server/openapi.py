"""/openapi.json: the API in OpenAPI 3.1, generated from the models that parse the bodies, so that the two cannot differ."""

from typing import Any

from pydantic import BaseModel

from tilewright import __version__
from tilewright.server.adapters import LoadBody, UnloadBody
from tilewright.server.config import ServerConfig
from tilewright.server.embeddings import EmbeddingsBody, RerankBody, ScoreBody
from tilewright.server.protocol import ChatBody, CompletionBody
from tilewright.server.responses import ResponsesBody
from tilewright.server.tokens import DetokenizeBody, TokenizeBody

__all__ = ["openapi"]


POSTS: dict[str, tuple[str, type[BaseModel], str]] = {
    "/v1/completions": ("Complete a prompt; with `stream`, as server-sent events", CompletionBody, "text_completion"),
    "/v1/chat/completions": ("Answer a chat; with `stream`, as server-sent events", ChatBody, "chat.completion"),
    "/v1/responses": ("Answer a chat in items; with `stream`, as server-sent events", ResponsesBody, "response"),
    "/v1/embeddings": ("Embeddings of texts or token ids", EmbeddingsBody, "list of embeddings"),
    "/v1/score": ("Scores of pairs of texts", ScoreBody, "list of scores"),
    "/v1/rerank": ("Documents ordered by their relevance to a query", RerankBody, "results, the best first"),
    "/v1/load_lora_adapter": ("Load a LoRA adapter, where the operator allows it", LoadBody, "model"),
    "/v1/unload_lora_adapter": ("Unload one", UnloadBody, "deleted model"),
    "/tokenize": ("The token ids of a text or a chat", TokenizeBody, "tokens, count, max_model_len"),
    "/detokenize": ("The text of token ids", DetokenizeBody, "prompt"),
}
GETS = {
    "/v1/models": ("The model that is served, and its LoRA adapters", True),
    "/v1/models/{name}": ("The model or one of its adapters, by name", True),
    "/health": ("200 while the engine works, 503 if the server needs a restart", False),
    "/ready": ("200 while new requests are accepted", False),
    "/version": ("The version of tilewright", False),
    "/metrics": ("Prometheus metrics", True),
    "/live": ("The engine's state: requests, pages, counters", True),
    "/openapi.json": ("This description", True),
}
REFUSALS = {
    "400": "the request is wrong; `error.param` names the field",
    "401": "no API key, or a wrong one",
    "403": "this host or web page may not use this server",
    "404": "no such model",
    "408": "the body did not arrive in time",
    "413": "the body is too large",
    "415": "the body is not application/json",
    "429": "the queue is full; see retry-after",
    "500": "the server failed on this request",
    "503": "the server is draining, its engine has stopped, or too much arrives at once",
}
_ERROR_FIELDS = {
    "message": {"type": "string"},
    "type": {"type": "string"},
    "param": {"type": ["string", "null"]},
    "code": {"type": ["string", "null"]},
}
_ERROR = {"type": "object", "required": ["error"], "properties": {"error": {"type": "object", "properties": _ERROR_FIELDS}}}


def openapi(config: ServerConfig) -> dict[str, Any]:
    """The description of a server with this config."""
    schemas: dict[str, Any] = {"Error": _ERROR}
    paths: dict[str, Any] = {}
    for path, (words, body, made) in POSTS.items():
        schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {})
        schemas[body.__name__] = schema
        wanted = {"application/json": {"schema": {"$ref": f"#/components/schemas/{body.__name__}"}}}
        operation = {
            "summary": words,
            "requestBody": {"required": True, "content": wanted},
            "responses": {"200": {"description": made}, **_refusals(*REFUSALS)},
        }
        paths[path] = {"post": _secured(operation, config, asks=True)}
    for path, (words, asks) in GETS.items():
        operation: dict[str, Any] = {"summary": words, "responses": {"200": {"description": words}, **_refusals("403", "503")}}
        if "{name}" in path:
            operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
        paths[path] = {"get": _secured(operation, config, asks=asks)}
    components: dict[str, Any] = {"schemas": schemas}
    if config.api_key is not None:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    info = {"title": "tilewright", "version": __version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": components}


def _refusals(*statuses: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {status: {"description": REFUSALS[status], "content": content} for status in statuses}


def _secured(operation: dict[str, Any], config: ServerConfig, *, asks: bool) -> dict[str, Any]:
    return {**operation, "security": [{"key": []}]} if asks and config.api_key is not None else operation
