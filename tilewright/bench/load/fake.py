"""A service with known latencies, for checking the load generator.

It implements OpenAI's completions and v2's infer. Request number i of a server follows a `Script`: the first piece comes after
`first_s(i)`, each further one `gap_s(i)` later.

`python -m tilewright.bench.load.fake` serves a script on a free port and prints the URL. It records when it really sent each
piece, so that its own delays on a busy machine can be separated from the client's: GET /record. Both clocks are
CLOCK_MONOTONIC.
"""

import argparse
import asyncio
import json
import random
import time
from dataclasses import dataclass, field

from aiohttp import web

__all__ = ["Script", "serve_script"]


@dataclass(frozen=True, kw_only=True)
class Script:
    """Latencies by the number of a request. They are spread evenly over a range, in an order drawn from `seed`."""

    requests: int
    first_ms: tuple[float, float] = (300.0, 1200.0)
    gap_ms: tuple[float, float] = (60.0, 180.0)
    pieces: int = 8
    seed: int = 0
    reject_every: int = 0
    """Every `reject_every`-th request is refused with 429; 0: none."""
    _order: list[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        order = list(range(self.requests))
        random.Random(self.seed).shuffle(order)
        object.__setattr__(self, "_order", order)

    def _at(self, number: int, bounds: tuple[float, float]) -> float:
        share = (self._order[number % self.requests] + 0.5) / self.requests
        return (bounds[0] + share * (bounds[1] - bounds[0])) / 1000

    def first_s(self, number: int) -> float:
        """Seconds until the first piece of an answer."""
        return self._at(number, self.first_ms)

    def gap_s(self, number: int) -> float:
        """Seconds between two pieces of the answer."""
        return self._at(number, self.gap_ms)

    def rejects(self, number: int) -> bool:
        """Whether a request is refused."""
        return self.reject_every > 0 and number % self.reject_every == self.reject_every - 1


class _Service:
    def __init__(self, script: Script):
        self._script = script
        self._asked = 0
        self._record: list[dict[str, object]] = []

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_get("/v2/models/fake", self.metadata)
        app.router.add_post("/v2/models/fake/infer", self.infer)
        app.router.add_get("/record", self.record)
        return app

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake"}]})

    async def metadata(self, request: web.Request) -> web.Response:
        inputs = [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]
        return web.json_response({"name": "fake", "inputs": inputs, "outputs": []})

    async def record(self, request: web.Request) -> web.Response:
        return web.json_response(self._record)

    def _next(self) -> tuple[int, float]:
        number, self._asked = self._asked, self._asked + 1
        return number, time.monotonic()

    async def completions(self, request: web.Request) -> web.StreamResponse:
        number, came_s = self._next()
        asked = await request.read()
        if self._script.rejects(number):
            return web.json_response({"error": {"message": "full"}}, status=429, headers={"retry-after": "1"})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        sent_s: list[float] = []
        for piece in range(self._script.pieces):
            due_s = came_s + self._script.first_s(number) + piece * self._script.gap_s(number)
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            if not piece:
                await response.prepare(request)
            await response.write(b'data: {"choices": [{"index": 0, "text": "x"}]}\n\n')
            sent_s.append(time.monotonic())
        usage = {"prompt_tokens": len(asked), "completion_tokens": self._script.pieces}
        await response.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode())
        self._record.append({"number": number, "came_s": came_s, "sent_s": sent_s})
        return response

    async def infer(self, request: web.Request) -> web.Response:
        number, came_s = self._next()
        await request.read()
        await asyncio.sleep(max(0.0, came_s + self._script.first_s(number) - time.monotonic()))
        self._record.append({"number": number, "came_s": came_s, "sent_s": [time.monotonic()]})
        return web.json_response({"model_name": "fake", "outputs": []})


async def serve_script(script: Script, port: int = 0) -> tuple[web.AppRunner, str]:
    """Serve on this machine; return (the runner to clean up, the URL)."""
    runner = web.AppRunner(_Service(script).app(), access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


async def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tilewright.bench.load.fake", description=__doc__)
    parser.add_argument("--requests", type=int, default=1000, help="requests after which the latencies repeat")
    parser.add_argument("--first-ms", type=float, nargs=2, default=(300.0, 1200.0), help="range of the time to the first piece")
    parser.add_argument("--gap-ms", type=float, nargs=2, default=(60.0, 180.0), help="range of the time between pieces")
    parser.add_argument("--pieces", type=int, default=8, help="pieces of an answer")
    parser.add_argument("--reject-every", type=int, default=0, help="refuse one request in this many; 0: none")
    parser.add_argument("--port", type=int, default=0)
    given = parser.parse_args()
    script = Script(
        requests=given.requests,
        first_ms=tuple(given.first_ms),
        gap_ms=tuple(given.gap_ms),
        pieces=given.pieces,
        reject_every=given.reject_every,
    )
    runner, url = await serve_script(script, given.port)
    print(url, flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(_main())
