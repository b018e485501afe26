"""Random requests, made from a server's own /openapi.json: every field, in range, at its ends, beyond them, of wrong types.

A request is decided by (seed, number) alone, so that one that found something can be sent again.
"""

import json
import random
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

__all__ = ["Request", "make_request"]

INTEGERS = (
    -1, 0, 1, 2, 3, 7, 19, 20, 21, 127, 128, 129, 255, 256, 257, 258, 1024, 65536, 2**31 - 1, 2**31, 2**32, 2**53 + 1,
    2**63 - 1, 2**63, 2**64, 10**30, -(2**31), -(2**63), -(2**63) - 1, -(10**30),
)  # fmt: skip
FLOATS = (
    -0.0, 0.0, 0.5, 1.0, 1.5, 2.0, -1.0, -2.0, -2.1, 1e-8, 1e-45, 5e-324, 1e38, 3.5e38, 1e308, -1e308, 1e-300, 100.0,
    float("nan"), float("inf"), float("-inf"),
)  # fmt: skip
TEXTS = (
    "", "a", "Once upon a time", "été 🌍", "\x00", "\ud800", "a" * 60, "a" * 5000, "<eos>", "<bos><bos>", "\u202e\u0301" * 10,
    "\n\n", "%s{}{{x}}\\", '"}\r\n\r\ndata: [DONE]', "[user]", "\ufffd",
)  # fmt: skip
ODD: tuple[Any, ...] = (None, True, False, [], {}, [[]], {"": None}, "1", [1, "a"], {"type": "text"}, [None], "auto", "none")
ROLES = ("system", "user", "assistant", "developer", "tool", "function", "", None, 3)
EXTRA = (
    "regex", "tools", "tool_choice", "response_format", "guided_json", "suffix", "user", "metadata", "allowed_token_ids",
    "priority", "best_of", "prompt_logprobs", "return_token_ids", "chat_template", "chat_template_kwargs", "__class__",
    "x" * 300, "é",
)  # fmt: skip
PATHS = (
    "/", "/page/main.js", "/page/" + "a" * 300 + ".js", "/page/%2e%2e%2fapp.py",
    "/page/%00", "/health", "/ready", "/version",
    "/metrics", "/live", "/openapi.json", "/v1/models", "/v1/models/" + "m" * 500, "/v1/models/%ff%fe", "/nothing", "//",
    "/v1/completions/",
    "/*",
)  # fmt: skip
METHODS = ("GET", "GET", "GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "BREW")
HEADERS = {
    "content-type": ("text/plain", "", "application/json; charset=utf-16", "application/x-www-form-urlencoded", "é"),
    "accept": ("text/html", "", "application/xml;q=2"),
    "origin": ("https://evil.example", "null", "", "http://["),
    "x-request-id": ("abc", "a b", "x" * 500, "é", ""),
    "authorization": ("Bearer", "Bearer é", "Basic ==", ""),
    "expect": ("100-continue", "200-ok"),
    "content-encoding": ("gzip", "br"),
    "range": ("bytes=0-1", "bytes=-9999999999999"),
    "cookie": ("a" * 8000,),
    "accept-encoding": ("gzip", "*;q=0"),
    "connection": ("close", "keep-alive, Upgrade"),
}  # fmt: skip


@dataclass(kw_only=True)
class Request:
    """One request as it goes over the wire."""

    number: int
    method: str
    path: str
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        body = "" if self.body is None else f" {self.body[:600]!r}"
        return f"#{self.number} {self.method} {self.path[:120]} {self.headers}{body}"


def make_request(description: dict[str, Any], seed: int, number: int) -> Request:
    """The request of this number. `description` is the server's /openapi.json."""
    rng = random.Random(f"{seed}/{number}")
    if rng.random() < 0.15:
        return _plain(rng, number)
    posts = [path for path, verbs in description["paths"].items() if "post" in verbs]
    path = rng.choice(posts)
    schemas = description["components"]["schemas"]
    content = description["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    body = _body(rng, _resolved(content, schemas), schemas)
    raw = _damaged(rng, json.dumps(body, ensure_ascii=rng.random() < 0.9).encode(errors="surrogatepass"))
    headers = {"content-type": "application/json"}
    if rng.random() < 0.05:
        headers |= _header(rng)
    return Request(number=number, method="POST", path=path, body=raw, headers=headers)


def _plain(rng: random.Random, number: int) -> Request:
    path = rng.choice(PATHS) if rng.random() < 0.8 else "/" + quote(rng.choice(TEXTS)[:100], errors="replace")
    if rng.random() < 0.2:
        path += "?" + quote(rng.choice(TEXTS)[:100], errors="replace")
    body = None if rng.random() < 0.7 else b"x" * rng.choice((0, 1, 100, 100_000))
    return Request(number=number, method=rng.choice(METHODS), path=path, body=body, headers=_header(rng))


def _header(rng: random.Random) -> dict[str, str]:
    names = rng.sample(sorted(HEADERS), rng.randint(0, 2))
    return {name: rng.choice(HEADERS[name]) for name in names}


def _damaged(rng: random.Random, raw: bytes) -> bytes:
    kind = rng.random()
    if kind < 0.94:
        return raw
    if kind < 0.95:
        return raw[: rng.randint(0, len(raw))]
    if kind < 0.96:
        return b'{"max_tokens": ' + b"9" * rng.choice((400, 4300, 20_000)) + b"}"
    if kind < 0.97:
        depth = rng.choice((100, 1000, 100_000))
        return b'{"prompt": ' + b"[" * depth + b"]" * depth + b"}"
    if kind < 0.98:
        at = rng.randrange(len(raw))
        return raw[:at] + rng.randbytes(3) + raw[at:]
    return rng.choice((b"", b"null", b"[]", b"1e999", b'{"prompt": "a", "prompt": 1}', b"\xff\xfe{}", rng.randbytes(200)))


def _body(rng: random.Random, schema: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    """A body that works, with a few fields of the schema at random, and now and then one that is not in it."""
    properties = schema["properties"]
    body: dict[str, Any] = {}
    if "prompt" in properties and "messages" not in properties:
        body["prompt"] = rng.choice(TEXTS[:6])
    if "tokens" in properties:
        body["tokens"] = [rng.randrange(250) for _ in range(rng.randint(0, 20))]
    if "messages" in properties:
        body["messages"] = [{"role": "user", "content": rng.choice(TEXTS[:6])}]
    if "max_tokens" in properties:
        body["max_tokens"] = rng.randint(1, 6)
    for name in ("input", "text_1", "text_2", "query", "documents"):
        if name in properties:
            body[name] = rng.choice((rng.choice(TEXTS[:4]) or "b", [rng.choice(TEXTS[:4]) or "b" for _ in range(3)]))
    for name in rng.sample(sorted(properties), min(len(properties), rng.choice((0, 0, 1, 1, 2, 2, 3, 5)))):
        if name != "model":
            body[name] = _special(rng, name) if rng.random() < 0.3 else _value(rng, properties[name], schemas)
    if rng.random() < 0.1:
        body[rng.choice(EXTRA)] = rng.choice((*ODD, *INTEGERS[:4], "a"))
    return body


def _resolved(schema: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    return schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def _value(rng: random.Random, schema: dict[str, Any], schemas: dict[str, Any], depth: int = 0) -> Any:
    """A value of the schema, at an end of it, or of another type."""
    if rng.random() < 0.12 or depth > 3:
        return rng.choice((*ODD, rng.choice(INTEGERS), rng.choice(FLOATS), rng.choice(TEXTS)))
    schema = _resolved(schema, schemas)
    if "anyOf" in schema:
        return _value(rng, rng.choice(schema["anyOf"]), schemas, depth)
    if "enum" in schema:
        return rng.choice(schema["enum"])
    ends = [schema[key] for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum") if key in schema]
    kind = schema.get("type")
    if kind == "integer":
        return rng.choice([*INTEGERS, *(int(end) + step for end in ends for step in (-1, 0, 1)), rng.randint(0, 300)])
    if kind == "number":
        return rng.choice(
            [*FLOATS, *(end * scale for end in ends for scale in (0.999, 1, 1.001)), rng.random(), rng.choice(INTEGERS)]
        )
    if kind == "boolean":
        return rng.random() < 0.5
    if kind == "string":
        return rng.choice(TEXTS)
    if kind == "array":
        items = schema.get("items", {})
        return [_value(rng, items, schemas, depth + 1) for _ in range(rng.choice((0, 1, 2, 5, 200)))]
    if kind == "object" and "properties" in schema:
        return {name: _value(rng, one, schemas, depth + 1) for name, one in schema["properties"].items() if rng.random() < 0.7}
    if kind == "object":
        values = schema.get("additionalProperties")
        values = values if isinstance(values, dict) else {}
        keys = [str(rng.choice(INTEGERS)) if rng.random() < 0.5 else str(rng.randrange(258)) for _ in range(rng.randint(0, 5))]
        return {key: _value(rng, values, schemas, depth + 1) for key in keys}
    return rng.choice((*TEXTS, *ODD, rng.choice(INTEGERS), rng.choice(FLOATS)))


def _special(rng: random.Random, name: str) -> Any:
    """Values for fields whose schema says little."""
    if name in ("prompt", "input"):
        ids = [rng.choice(INTEGERS) for _ in range(3)]
        return rng.choice(
            (ids, [5] * 127, [5] * 128, [[1], [2, 3]], ["a", "b"], ["a", [1]], [""], [[]], "a" * 100_000, TEXTS[5])
        )
    if name == "messages":
        count = rng.choice((0, 1, 3, 40))
        contents = (*TEXTS, None, 3, [{"type": "text", "text": "a"}], [{"type": "image_url"}], [{}], [])
        return [{"role": rng.choice(ROLES), "content": rng.choice(contents)} for _ in range(count)]
    if name == "stop":
        return rng.choice(("a", ["a", "b"], ["a"] * 5, [""], "", "a" * 300, [3], TEXTS[4], ["\ud800"]))
    if name == "stream":
        return rng.random() < 0.8
    if name in ("n", "best_of"):
        return rng.choice((1, 2, 4, 128, 129, 0, -1))
    return rng.choice((*ODD, *INTEGERS))
