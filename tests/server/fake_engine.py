"""A real engine over a model that says the alphabet, and a real HTTP server around it.

The token at position p is the letter p mod 26 when greedy; with a temperature it is shifted by the seed. Prompts steer it:
`!` ends the text after five tokens, `#` makes the step fail, `@` writes one half of a two-byte character at a time.
"""

import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import tokenizers
from fastapi import FastAPI
from tokenizers import decoders, models, pre_tokenizers

from tests.awake import awake_s
from tilewright.engine.blocks import BlockPool
from tilewright.engine.core import Engine
from tilewright.engine.pooling import Pass
from tilewright.engine.request import Request, TokenLogprobs
from tilewright.engine.schedule import Scheduler
from tilewright.engine.step import FillMasks, Step, StepResult
from tilewright.engine.tokenizer import Tokenizer
from tilewright.server.app import Server, create_app
from tilewright.server.config import ServerConfig
from tilewright.server.engine_process import EngineProcess
from tilewright.server.front import front_app
from tilewright.server.grammars import GrammarCompiler
from tilewright.server.prompts import Served
from tilewright.server.serve import HttpServer, bind, url_of
from tilewright.server.wire import address_of

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' and not loop.first and messages[loop.index0 - 1].role == "
    "'user' %}{{ raise_exception('two user turns in a row') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
)
BOS, EOS = 256, 257
VOCAB = 258


def byte_tokenizer(*, bos: bool = True, chat: bool = True) -> Tokenizer:
    """One token a byte, its id the byte's value; <bos> and <eos> behind them."""
    backend = byte_backend()
    special = {"eos_token": "<eos>", **({"bos_token": "<bos>"} if bos else {})}
    return Tokenizer(backend, special_tokens=special, chat_template=CHAT_TEMPLATE if chat else None)


def byte_backend() -> tokenizers.Tokenizer:
    """The same, without what stands beside tokenizer.json."""
    alphabet = _byte_names()
    backend = tokenizers.Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<bos>", "<eos>"])
    return backend


def _byte_names() -> list[str]:
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def letter(position: int, seed: int = 0) -> int:
    """The token at a position."""
    return ord("a") + (position + seed) % 26


class LetterRunner:
    """See the module's text. `delay_s` is the time of a step."""

    asynchronous = False

    def __init__(self, delay_s: float = 0.0):
        self.delay_s = delay_s
        self.steps = 0
        self._flags: dict[Step, dict[int, np.ndarray]] = {}

    def launch(self, step: Step) -> Step:
        """Fails where a prompt has a `#`."""
        self.steps += 1
        if any(ord("#") in row.request.prompt_ids for row in step.rows):
            raise RuntimeError("the device is on fire")
        return step

    def sample(self, ticket: Step, words: int, fill: FillMasks) -> None:
        """Keeps the masks of a step."""
        bits = np.zeros((int(ticket.samples[list(ticket.masked)].sum()), words), np.int32)
        fill(bits)
        flags = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")
        self._flags = {ticket: dict(zip(ticket.masked, flags, strict=True))}

    def token(self, request: Request, position: int) -> int:
        """What a request says at a position; where a mask forbids that, the next allowed token is taken."""
        return _token(request, position)

    def collect(self, ticket: Step) -> StepResult:
        """Letters."""
        time.sleep(self.delay_s)
        tokens = [[self.token(row.request, row.start + row.count)] if row.samples else [] for row in ticket.rows]
        for row, flags in self._flags.pop(ticket, {}).items():
            wanted = tokens[row][0]
            tokens[row] = [next(t % VOCAB for t in range(wanted, wanted + VOCAB) if flags[t % VOCAB])]
        result = StepResult.of(tokens)
        for row, drawn in zip(ticket.rows, tokens, strict=True):
            wanted, asked = row.request.params.logprobs, row.request.params.prompt_logprobs
            result.logprobs.extend(None if wanted is None else logprob(token, wanted) for token in drawn)
            targets = row.request.prompt_ids[row.start + 1 : row.start + row.count + 1]
            result.prompt_logprobs.append(None if asked is None else [logprob(t, asked) for t in targets])
        return result


def _token(request: Request, position: int) -> int:
    generated = position - len(request.prompt_ids)
    if ord("!") in request.prompt_ids and generated == 5:
        return EOS
    if ord("@") in request.prompt_ids:
        return "é".encode()[generated % 2]
    return letter(position, 0 if request.params.temperature == 0 else request.seed)


def logprob(token: int, alternatives: int) -> TokenLogprobs:
    """The chosen token is the likeliest, then come `A`, `B` ..."""
    others = [(token, -0.5), *((ord("A") + i, -1.5 - i) for i in range(alternatives))]
    return TokenLogprobs(token_id=token, logprob=-0.5, rank=1, top=tuple(others[:alternatives]))


def fake_engine(
    *,
    delay_s: float = 0.0,
    max_model_len: int = 128,
    max_seqs: int = 8,
    max_waiting: int = 16,
    pages: int = 256,
    page_size: int = 4,
    bos: bool = True,
    chat: bool = True,
) -> Engine:
    """An engine that says the alphabet."""
    scheduler = Scheduler(
        blocks=BlockPool(pages, page_size),
        max_seqs=max_seqs,
        max_tokens_per_step=max(256, max_seqs),
        max_model_len=max_model_len,
        max_waiting=max_waiting,
    )
    tokenizer = byte_tokenizer(bos=bos, chat=chat)
    return Engine(LetterRunner(delay_s), tokenizer, tokenizer.eos_ids, scheduler)


class Running:
    """A server that listens; `url` without a slash."""

    def __init__(self, url: str, engine: Engine, server: Server, process: EngineProcess | None):
        self.url = url
        self.engine = engine
        self.server = server
        self.process = process
        self.address = ""
        """Of the engine, where it is behind a socket."""
        self.compiler: GrammarCompiler = (process or server.worker)._grammars  # type: ignore[union-attr]

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.url.rpartition(":")[2])

    def until_idle(self, timeout_s: float = 30.0) -> None:
        """Wait until no request runs or waits and every page is free or kept for reuse."""
        end_s = awake_s() + timeout_s
        while (stats := self.engine.stats()).running or stats.waiting or stats.pages_used:
            assert awake_s() < end_s, f"still busy after {timeout_s} s: {stats}"
            time.sleep(0.005)


@contextmanager
def behind_a_socket(
    engine: Engine, served: Served, run_pass: Callable[[Pass], np.ndarray] | None = None
) -> Iterator[tuple[EngineProcess, str]]:
    """Serve an engine to front processes, in a thread; with the address."""
    with tempfile.TemporaryDirectory() as folder:
        process = EngineProcess(engine, served.description(), Path(folder), run_pass=run_pass)
        thread = threading.Thread(target=process.run, daemon=True)
        thread.start()
        try:
            yield process, address_of(Path(folder))
        finally:
            process.stop()
            thread.join(10)
            assert not thread.is_alive(), "the engine's process did not end"


SHAPES = ("thread", "process")
"""Where the engine runs: in a thread of the server, or behind the socket of a process of its own."""
shape_now = "thread"
"""That of `running`; the fixture `shape` sets it."""


@contextmanager
def running(engine: Engine | None = None, **config: object) -> Iterator[Running]:
    """Serve an engine on a free port, in a thread."""
    engine = engine or fake_engine()
    settings = ServerConfig(port=0, **config)  # type: ignore[arg-type]
    served = Served.of(engine, "letters")
    with ExitStack() as stack:
        if shape_now == "process":
            process, address = stack.enter_context(behind_a_socket(engine, served))
            app = front_app(address, settings, served)
        else:
            process, app = None, create_app(engine, served, settings)
        for server in _listening(app, settings, engine, process):
            server.address = "" if process is None else address
            yield server


def _listening(app: FastAPI, settings: ServerConfig, engine: Engine, process: EngineProcess | None) -> Iterator[Running]:
    listener = bind(settings)
    server = HttpServer(app, listener)
    server.config.timeout_graceful_shutdown = 2
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server ended while starting"
        time.sleep(0.005)
    try:
        yield Running(url_of(listener), engine, app.state.server, process)
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive(), "the server did not end"


def events(body: str) -> list[dict[str, object] | str]:
    """The data of server-sent events, parsed; the last is "[DONE]" when the stream ended well."""
    lines = [block for block in body.split("\n\n") if block]
    assert all(line.startswith("data: ") and "\n" not in line for line in lines), body
    data = [line.removeprefix("data: ") for line in lines]
    return [item if item == "[DONE]" else json.loads(item) for item in data]
