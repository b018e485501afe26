"""Targets of a load test: the common interface, and OpenAI's completions and chat as streams. v2.py has the v2 protocol.

A target prepares a request body before its time, so that making a long prompt does not delay the schedule, and then sends it.
It records when the pieces of the answer arrive. An answer of 429 or 503 counts as a rejection.
"""

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any, Protocol

import aiohttp

from tilewright.bench.load.prompts import Prompts
from tilewright.bench.load.sample import FAILED, OK, REJECTED, Sample
from tilewright.bench.load.schedule import Planned

__all__ = ["Http", "OpenAI", "Target", "get_json", "open_session", "until_ready"]

Clock = Callable[[], float]
READY_EVERY_S = 1.0
"""How often a service that is loading is asked whether it is ready."""
MAX_EVENT_BYTES = 4 << 20
"""Longest event of a stream, and longest error, that is read."""


class Target(Protocol):
    """A service."""

    def prepare(self, planned: Planned) -> bytes:
        """Prepare the body of a request."""
        ...

    async def send(self, body: bytes, sample: Sample, clock: Clock) -> None:
        """Send a request and write the result into `sample`, with times of `clock`. Errors of the service are not raised."""
        ...


def open_session(timeout_s: float, api_key: str | None = None) -> aiohttp.ClientSession:
    """A session without a limit on connections. A whole request may take at most `timeout_s` seconds."""
    headers = {"content-type": "application/json"}
    if api_key is not None:
        headers["authorization"] = f"Bearer {api_key}"
    timeout = aiohttp.ClientTimeout(total=timeout_s, connect=None, sock_connect=30)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers, read_bufsize=1 << 18)


async def until_ready(session: aiohttp.ClientSession, url: str, most_s: float, say: Callable[[str], None]) -> None:
    """Wait as long as a service reports on /ready that it is loading. Does not wait if the service has no such path.

    Raises:
        OSError: the service is still loading after `most_s` seconds.
    """
    began_s, said = time.monotonic(), False
    while (loading := await _loading(session, url, said)) is not None:
        left_s = most_s - (time.monotonic() - began_s)
        if left_s <= 0:
            raise OSError(f"{url} is still loading after {most_s:g} s ({loading}); wait longer with --wait")
        if not said:
            say(f"{url} is loading {loading}; waiting for it for at most {most_s:g} s")
            said = True
        await asyncio.sleep(min(READY_EVERY_S, left_s))


async def _loading(session: aiohttp.ClientSession, url: str, before: bool) -> str | None:
    """The models that a service reports as loading, or None.

    `before`: whether it did so at the previous request; a service that does not answer now may be between two processes.
    """
    try:
        async with session.get(f"{url}/ready") as response:
            said = json.loads(await response.content.read(4096)) if response.status == 503 else None
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return "its model" if before else None
    return str(said.get("loading", "its model")) if isinstance(said, dict) and said.get("status") == "loading" else None


async def get_json(session: aiohttp.ClientSession, url: str) -> Any:
    """The JSON answer of a service. Raises OSError or ValueError with a sentence."""
    try:
        async with session.get(url) as response:
            if response.status != 200:
                raise ValueError(f"{url} answers {response.status}, wanted 200; is this the service's base URL?")
            return json.loads(await response.read())
    except aiohttp.ClientError as error:
        raise OSError(f"{url} cannot be reached: {error}") from None
    except TimeoutError:
        raise OSError(f"{url} does not answer in time") from None


class Http:
    """The common part of both protocols: a `Target`, and the preparation and clean-up of stages."""

    def __init__(self, session: aiohttp.ClientSession, url: str):
        self._session, self._url = session, url
        self._headers = dict[str, str]()
        """Of this target's requests, beside the session's."""

    async def begin(self, in_flight: int | None) -> None:
        """Prepare for a stage with so many requests in flight; None: the number is unknown. Raises OSError or ValueError."""

    async def close(self) -> None:
        """Make the service release what it keeps for this test. Errors of the service are not raised."""

    def prepare(self, planned: Planned) -> bytes:
        """See `Target`."""
        raise NotImplementedError

    async def send(self, body: bytes, sample: Sample, clock: Clock) -> None:
        """See `Target`."""
        sample.sent_s = clock()
        try:
            async with self._session.post(self._url, data=body, headers=self._headers) as response:
                if response.status == 200:
                    await self._read(response, sample, clock)
                else:
                    sample.status = REJECTED if response.status in (429, 503) else FAILED
                    text = (await response.content.read(2048)).decode(errors="replace")
                    sample.detail = f"{response.status} {_message(text)}"
        except TimeoutError:
            sample.status, sample.detail = FAILED, "no answer within the timeout"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            sample.status, sample.detail = FAILED, f"{type(error).__name__}: {error}"[:200]
        sample.end_s = clock()

    async def _read(self, response: aiohttp.ClientResponse, sample: Sample, clock: Clock) -> None:
        raise NotImplementedError


class OpenAI(Http):
    """`/v1/completions` with prompts of token ids, or `/v1/chat/completions` with text; both streamed."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, model: str, prompts: Prompts, *, chat: bool, ignore_eos: bool = True
    ):
        super().__init__(session, url + ("/v1/chat/completions" if chat else "/v1/completions"))
        self._prompts, self._chat = prompts, chat
        self._fields: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
        self._fields |= {"temperature": 0.0}
        if ignore_eos:
            self._fields["ignore_eos"] = True

    @classmethod
    async def model_of(cls, session: aiohttp.ClientSession, url: str) -> str:
        """The name of the first model that a service lists."""
        listed = await get_json(session, f"{url}/v1/models")
        models = listed.get("data") if isinstance(listed, dict) else None
        if not isinstance(models, list) or not models or not isinstance(models[0], dict) or "id" not in models[0]:
            raise ValueError(f"{url}/v1/models lists no model; give one with --model")
        return str(models[0]["id"])

    def prepare(self, planned: Planned) -> bytes:
        """See `Target`."""
        fields = {**self._fields, "max_tokens": planned.output_tokens}
        if self._chat:
            text = self._prompts.text(planned.prompt_tokens, planned.blocks)
            fields["messages"] = [{"role": "user", "content": text}]
        else:
            fields["prompt"] = self._prompts.ids(planned.prompt_tokens, planned.blocks)
        return json.dumps(fields, separators=(",", ":")).encode()

    async def _read(self, response: aiohttp.ClientResponse, sample: Sample, clock: Clock) -> None:
        if "text/event-stream" not in response.headers.get("content-type", ""):
            raise ValueError(f"the answer has type {response.headers.get('content-type')!r}, wanted an event stream")
        rest, done = b"", False
        async for chunk in response.content.iter_any():
            now_s = clock()
            *events, rest = (rest + chunk).replace(b"\r\n", b"\n").split(b"\n\n")
            if len(rest) > MAX_EVENT_BYTES:
                raise ValueError(f"an event is longer than {MAX_EVENT_BYTES} bytes")
            for event in events:
                done |= self._event(event, sample, now_s)
        if not done:
            raise ValueError(sample.detail or "the stream ended before its last event, [DONE]")
        sample.status = OK
        sample.output_tokens = sample.output_tokens or len(sample.pieces_s)

    def _event(self, event: bytes, sample: Sample, now_s: float) -> bool:
        """Process an event; return whether it was the last one."""
        data = b"".join(line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:"))
        if data == b"[DONE]":
            return True
        if not data:
            return False
        said = json.loads(data)
        if not isinstance(said, dict) or "error" in said:
            sample.detail = _message(data.decode(errors="replace"))
            raise ValueError(sample.detail)
        if usage := said.get("usage"):
            sample.prompt_tokens = int(usage.get("prompt_tokens") or 0)
            sample.output_tokens = int(usage.get("completion_tokens") or 0)
            sample.cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        if any(map(_has_text, said.get("choices") or ())):
            sample.pieces_s.append(now_s)
        return False


def _has_text(choice: dict[str, Any]) -> bool:
    if choice.get("text"):
        return True
    delta = choice.get("delta") or {}
    return any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls"))


def _message(text: str) -> str:
    """The message of an error, in one line."""
    try:
        found = json.loads(text)
        error = found.get("error", found) if isinstance(found, dict) else found
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except ValueError:
        pass
    return " ".join(text.split())[:200]
