"""Hosts of models that are functions (fakes.py), and asking them."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.host.fakes import Dies, Hangs, Makes, array, wire
from tilewright.host.config import ModelConfig
from tilewright.host.host import Host, Source
from tilewright.host.repository import Repository
from tilewright.host.version import Ask


def double(x: np.ndarray) -> np.ndarray:
    return 2 * x


def marked(x: np.ndarray) -> np.ndarray:
    """Doubles; a row of -1 raises, of -2 kills, of -3 hangs."""
    for value, error in ((-1, ValueError("a poisoned row")), (-2, Dies()), (-3, Hangs())):
        if (x == value).any():
            raise error
    return 2 * x


def served(makes: Makes, test: Callable[[Host], Awaitable[None]], **config: Any) -> None:
    """Run a test of one model, `m`."""

    async def run() -> None:
        host = Host(sources={"m": Source(ModelConfig(source="a:b", **config), None)}, start=makes)
        await host.start()
        try:
            await test(host)
        finally:
            await host.close()

    asyncio.run(run())


async def ask(
    host: Host, value: float = 1.0, rows: int = 1, name: str = "m", version: str | None = None, **said: Any
) -> np.ndarray:
    answer = await host.infer(name, version, wire(rows, value), Ask(**said))
    return array(tuple(answer.outputs.values()))


async def ask_all(host: Host, values: list[float], **said: Any) -> list[Any]:
    return await asyncio.gather(*(ask(host, value, **said) for value in values), return_exceptions=True)


async def first_alone(host: Host, makes: Makes, *asked: Awaitable[Any]) -> list[Any]:
    """The answers of requests, of which the first is being computed when the others come."""
    first = asyncio.ensure_future(asked[0])
    await until(lambda: bool(makes.made[0].handed))  # not until it is busy: on a busy machine that may be over already
    return await asyncio.gather(first, *asked[1:], return_exceptions=True)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0.001)


def write_model(folder: Path, *versions: str, toml: str = "") -> None:
    for number, factor in enumerate(versions, 1):
        (folder / str(number)).mkdir(parents=True, exist_ok=True)
        (folder / str(number) / "factor.txt").write_text(factor)
    (folder / "model.toml").write_text(f"[model]\n{toml}")


def with_repository(folder: Path, test: Callable[[Host, Makes], Awaitable[None]], **makes: Any) -> None:
    async def run() -> None:
        start = Makes(makes.pop("compute", double), **makes)
        host = Host(Repository(folder), start=start)
        await host.start()
        try:
            await test(host, start)
        finally:
            await host.close()

    asyncio.run(run())
