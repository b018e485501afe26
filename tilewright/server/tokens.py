"""Text <-> token ids over HTTP: /tokenize encodes a prompt or a chat in the model's template, /detokenize decodes token ids."""

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict

from tilewright.server.config import ServerConfig
from tilewright.server.errors import bad_request
from tilewright.server.fields import ChatBody
from tilewright.server.prompts import Served, encode
from tilewright.server.protocol import chat_ids_of, parse

__all__ = ["DetokenizeBody", "TokenEndpoints", "TokenizeBody"]


class TokenizeBody(BaseModel):
    """Fields of /tokenize: a prompt, or messages with what their template takes."""

    model_config = ConfigDict(strict=True)
    model: str | None = None
    prompt: str | None = None
    messages: Any = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    allow_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Any = None


class DetokenizeBody(BaseModel):
    """Fields of /detokenize."""

    model_config = ConfigDict(strict=True)
    model: str | None = None
    tokens: list[int]


class TokenEndpoints:
    """/tokenize and /detokenize.

    `prepared`: (request, read) -> read(body), which runs outside the event loop if that is worth the overhead.
    """

    def __init__(self, served: Served, config: ServerConfig, prepared: Callable[..., Awaitable[Any]]):
        self._served, self._config, self._prepared = served, config, prepared

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize {prompt} or {messages} -> {count, max_model_len, tokens}."""
        tokens = await self._prepared(request, self._ids)
        return JSONResponse({"count": len(tokens), "max_model_len": self._served.max_model_len, "tokens": tokens})

    def _ids(self, raw: bytes) -> list[int]:
        body, served = parse(raw, TokenizeBody), self._served
        served.adapter_of(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("exactly one of prompt and messages must be given", "prompt")
        if body.prompt is None:
            fields = {name: getattr(body, name) for name in TokenizeBody.model_fields if name != "prompt"}
            return chat_ids_of(ChatBody.model_validate(fields), served, self._config)
        for name in ("add_generation_prompt", "allow_special_tokens", "chat_template_kwargs", "tools"):
            if getattr(body, name) is not None:
                raise bad_request(f"{name} is set with prompt, but it works only with messages", name)
        special = body.add_special_tokens is not False
        if not body.prompt:
            return served.tokenizer.encode("", add_special=special)
        return encode(body.prompt, served, add_special=special)

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize {tokens} -> {prompt}."""

        def work(raw: bytes) -> str:
            body = parse(raw, DetokenizeBody)
            self._served.adapter_of(body.model)
            return self._served.tokenizer.decode(self._served.check_ids(body.tokens, "tokens"))

        return JSONResponse({"prompt": await self._prepared(request, work)})
