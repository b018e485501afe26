"""Lines of requests, which reach the log without a record: the same as with one, and records are made where they count."""

import json
import logging
import os
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tilewright.server.logs import FIELDS, Log, request_line

NAME = "tilewright.server.access"
WORDS = {"request_id": "req-1", "status": 200, "duration_s": 0.001, "client": None}
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    found = logging.getLogger(NAME)
    yield found
    found.filters.clear()
    found.handlers.clear()
    logging.disable(logging.NOTSET)


def written(path: Path, say: Any, **config: Any) -> list[str]:
    """The lines of a log while `say` is called, with the times taken out."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        with Log(descriptor=fd, **config):
            say()
    finally:
        os.close(fd)
    lines = path.read_text().splitlines()
    assert all(len(TIME.findall(line)) == 1 for line in lines), lines
    return [TIME.sub("TIME", line) for line in lines]


@pytest.mark.parametrize("format", ["text", "json"])
@pytest.mark.parametrize("level", [logging.INFO, logging.ERROR])
def test_a_line_is_the_same_with_and_without_a_record(tmp_path: Path, logger: logging.Logger, format: str, level: int) -> None:
    short = written(tmp_path / "log", lambda: request_line(logger, level, "GET /é 200%s", WORDS), format=format)
    record = written(tmp_path / "log", lambda: logger.log(level, "%s", "GET /é 200%s", extra={FIELDS: WORDS}), format=format)
    assert short == record
    assert len(short) == 1
    if format == "json":
        assert json.loads(short[0])["request_id"] == "req-1"


def test_a_level_that_is_off_writes_nothing(tmp_path: Path, logger: logging.Logger) -> None:
    def say() -> None:
        request_line(logger, logging.INFO, "no", WORDS)
        request_line(logger, logging.ERROR, "yes", WORDS)
        logging.disable(logging.ERROR)
        request_line(logger, logging.ERROR, "no", WORDS)

    assert written(tmp_path / "log", say, level="warning") == ["TIME ERROR yes"]


def test_a_filter_and_another_handler_see_a_record(tmp_path: Path, logger: logging.Logger) -> None:
    seen = list[Any]()

    class Sees(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append((record.getMessage(), getattr(record, FIELDS)))

    with closing(Sees()) as handler:
        logger.addHandler(handler)
        assert written(tmp_path / "log", lambda: request_line(logger, logging.INFO, "one", WORDS)) == ["TIME INFO one"]
        assert seen == [("one", WORDS)]
        logger.removeHandler(handler)
    logger.addFilter(lambda record: "secret" not in record.getMessage())

    def say() -> None:
        request_line(logger, logging.INFO, "secret", WORDS)
        request_line(logger, logging.INFO, "two", WORDS)

    assert written(tmp_path / "log", say) == ["TIME INFO two"]
