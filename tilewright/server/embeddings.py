"""Embeddings and scores over HTTP: parsing the bodies and writing the answers.

    POST /v1/embeddings   {input, encoding_format?, dimensions?}     OpenAI's; a text, token ids, or lists of them
    POST /v1/score        {text_1, text_2}                           the score of each pair; a single text_1 is paired with all
    POST /v1/rerank       {query, documents, top_n?}                 documents by their scores, the best first

All inputs are checked before any is sent to the model, and none is truncated. The numbers of an answer are float32, each
written with as few digits as possible. Bodies are tokenized, and answers are encoded as JSON, outside the event loop.
"""

import base64
import json
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from tilewright.engine.pairs import Asked
from tilewright.engine.pooling import Pooled, Text
from tilewright.engine.tokenizer import TokenizerError
from tilewright.server.config import ServerConfig
from tilewright.server.errors import ApiError, bad_request
from tilewright.server.prompts import Served, check_length, read_prompts
from tilewright.server.protocol import parse

__all__ = ["EmbeddingsBody", "PoolJob", "RerankBody", "ScoreBody", "embeddings_job", "rerank_job", "score_job"]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True)
    model: str | None = None
    user: str | None = None


class EmbeddingsBody(_Body):
    """Fields of /v1/embeddings."""

    input: Any = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int | None, Field(ge=1, le=1 << 20)] = None


class ScoreBody(_Body):
    """Fields of /v1/score."""

    text_1: Any = None
    text_2: Any = None


class RerankBody(_Body):
    """Fields of /v1/rerank."""

    query: Any = None
    documents: Any = None
    top_n: Annotated[int | None, Field(ge=1, le=1 << 20)] = None
    return_documents: bool = True


@dataclass(frozen=True, kw_only=True)
class PoolJob:
    """A checked request: the texts for the model, and the function that makes the answer from the model's output."""

    texts: Sequence[Text]
    answer: Callable[[np.ndarray], bytes]
    labels: bool = False
    dimensions: int | None = None

    @property
    def tokens(self) -> int:
        """Number of tokens of all texts."""
        return sum(len(text.ids) for text in self.texts)


def embeddings_job(raw: bytes, served: Served, config: ServerConfig) -> PoolJob:
    """The job of a /v1/embeddings body. Raises `ApiError`."""
    body = parse(raw, EmbeddingsBody)
    pooled = _pooled(served, body.model)
    try:
        pooled.check_dimensions(body.dimensions)
    except ValueError as error:
        raise bad_request(str(error), "dimensions") from None
    inputs = read_prompts(body.input, served, config.max_inputs, field="input")
    texts = [Text(ids) for ids in inputs]
    for at, text in enumerate(texts):
        _check(pooled, text, "input" if len(texts) == 1 else f"input.{at}")
    usage = _usage(texts)

    def answer(rows: np.ndarray) -> bytes:
        _check_numbers(rows)
        data = [
            {"object": "embedding", "index": i, "embedding": _written(row, body.encoding_format)} for i, row in enumerate(rows)
        ]
        return _json({"object": "list", "data": data, "model": served.name, "usage": usage})

    return PoolJob(texts=texts, answer=answer, dimensions=body.dimensions)


def score_job(raw: bytes, served: Served, config: ServerConfig) -> PoolJob:
    """The job of a /v1/score body. Raises `ApiError`."""
    body = parse(raw, ScoreBody)
    pooled = _pooled(served, body.model)
    first, second = (_texts(text, name, served, config) for text, name in ((body.text_1, "text_1"), (body.text_2, "text_2")))
    pairs = _pairs(pooled, served, first, second, ("text_1", "text_2"))

    def answer(rows: np.ndarray) -> bytes:
        _check_numbers(rows)
        data = [{"object": "score", "index": i, "score": score} for i, score in enumerate(_short(pairs.read(rows)))]
        made = {"id": f"score-{uuid.uuid4().hex}", "object": "list", "created": int(time.time()), "model": served.name}
        return _json({**made, "data": data, "usage": _usage(pairs.texts)})

    return PoolJob(texts=pairs.texts, answer=answer, labels=pairs.labels)


def rerank_job(raw: bytes, served: Served, config: ServerConfig) -> PoolJob:
    """The job of a /v1/rerank body. Raises `ApiError`."""
    body = parse(raw, RerankBody)
    pooled = _pooled(served, body.model)
    query = _texts(body.query, "query", served, config)
    if len(query) != 1:
        raise bad_request(f"query has {len(query)} texts, wanted one", "query")
    given = body.documents
    if isinstance(given, list):
        given = [one.get("text") if isinstance(one, dict) else one for one in given]
    documents = _texts(given, "documents", served, config)
    pairs = _pairs(pooled, served, query, documents, ("query", "documents"))

    def answer(rows: np.ndarray) -> bytes:
        _check_numbers(rows)
        scores = _short(pairs.read(rows))
        best = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n]
        results: list[dict[str, Any]] = [{"index": i, "relevance_score": scores[i]} for i in best]
        for result in results if body.return_documents else ():
            result["document"] = {"text": documents[result["index"]]}
        usage = _usage(pairs.texts)
        return _json({"id": f"rerank-{uuid.uuid4().hex}", "model": served.name, "usage": usage, "results": results})

    return PoolJob(texts=pairs.texts, answer=answer, labels=pairs.labels)


# ---- bodies


def _pooled(served: Served, model: str | None) -> Pooled:
    served.check_name(model)
    if served.pooled is None:
        raise bad_request(
            "this model has no embeddings, because it uses latent attention; use another model", code="not_supported"
        )
    return served.pooled


def _texts(given: Any, name: str, served: Served, config: ServerConfig) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not texts:
        raise bad_request(f"{name} is missing, empty or not text, wanted a text or a list of texts", name)
    if len(texts) > config.max_inputs:
        raise bad_request(f"{name} has {len(texts)} texts, wanted at most {config.max_inputs}", name)
    for at, text in enumerate(texts):
        where = name if isinstance(given, str) else f"{name}.{at}"
        if not isinstance(text, str):
            raise bad_request(f"{where} is of type {type(text).__name__}, wanted a text", where)
        if any("\ud800" <= char <= "\udfff" for char in text):
            raise bad_request(f"{where} has a lone surrogate, wanted valid Unicode", where)
        check_length(text, served, where)
    return texts


def _pairs(pooled: Pooled, served: Served, first: list[str], second: list[str], names: tuple[str, str]) -> Asked:
    try:
        return Asked(pooled, served.tokenizer, first, second)
    except TokenizerError as error:
        raise bad_request(str(error), names[1]) from None
    except ValueError as error:
        raise bad_request(f"{names[0]}, {names[1]}: {error}", names[1]) from None


def _check(pooled: Pooled, text: Text, where: str) -> None:
    try:
        pooled.check(text.ids)
    except ValueError as error:
        raise bad_request(f"{where}: {error}", where) from None


# ---- answers


def _usage(texts: Sequence[Text]) -> dict[str, int]:
    tokens = sum(len(text.ids) for text in texts)
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def _check_numbers(rows: np.ndarray) -> None:
    if not np.isfinite(rows).all():
        raise ApiError(
            500, "the model computed numbers that are not finite; check its weights", type="server_error", code="not_numbers"
        )


def _written(row: np.ndarray, format: str) -> Any:
    if format == "base64":
        return base64.b64encode(row.astype("<f4").tobytes()).decode()
    return _short(row.tolist())


def _short(numbers: Sequence[float]) -> list[float]:
    """The numbers as the shortest decimals that give the same float32."""
    return [float(str(number)) for number in np.asarray(numbers, np.float32)]


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
