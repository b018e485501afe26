"""A model without a model: the next token is a hash of everything that the request's pages hold.

Its memory is as a real runner's: pages of cells, in two layers. A cell of layer 0 holds its token and position; one of layer 1
a hash of all layer-0 cells up to it, read through the block table when it is written; the sample is a hash of all layer-1
cells. So a page given to two owners, shared before it was filled, evicted while in use, copied too early or not at all, changes
the tokens that come out, against `expected`, which hashes the plain token list.

With `window` there is a third layer, whose cells are those of layer 0, in pages of its own. `broken` says what a row that reads
its window there has found to be otherwise.

`asynchronous`: nothing runs before it is collected, so a step runs as late as a device could, after the next was launched.
"""

import time
from collections.abc import Callable
from functools import lru_cache

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from tilewright.engine.blocks import BlockPool
from tilewright.engine.request import SamplingParams, TokenLogprobs
from tilewright.engine.schedule import Scheduler
from tilewright.engine.step import FillMasks, Row, Step, StepResult, agreed
from tilewright.engine.tokenizer import Tokenizer
from tilewright.engine.windows import Windows

EMPTY = -1
MODULUS = (1 << 61) - 1


def byte_tokenizer() -> Tokenizer:
    """A byte-level tokenizer without merges: token i is byte i, token 256 is the special <end>."""
    # GPT-2's spelling of bytes: printable ones are themselves, the rest moves to 256 and on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = {byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in printable)}
    vocab = {moved.get(byte, chr(byte)): byte for byte in range(256)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return Tokenizer(backend, special_tokens={"eos_token": "<end>"})


def scheduler(
    pages: int = 64,
    size: int = 4,
    *,
    max_seqs: int = 4,
    budget: int = 32,
    chunk: int | None = None,
    waiting: int = 1000,
    cache: bool = True,
    host: int = 0,
    model_len: int = 1000,
    window: tuple[int, int] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Scheduler:
    """A scheduler with small bounds. window: (tokens that are seen, pages of layers that see no more)."""
    seen = None if window is None else Windows(BlockPool(window[1], size, prefix_cache=cache), window[0])
    return Scheduler(
        blocks=BlockPool(pages, size, prefix_cache=cache, host_pages=host),
        max_seqs=max_seqs,
        max_tokens_per_step=budget,
        max_model_len=model_len,
        max_waiting=waiting,
        prefill_chunk=chunk,
        windows=seen,
        clock=clock,
    )


def mix(state: int, value: int) -> int:
    """One step of a chain hash; far from commutative, so the order of cells counts."""
    return (state * 6364136223846793005 + value * 2862933555777941757 + 1442695040888963407) % MODULUS


def fold(values: list[int], state: int = 1) -> int:
    """The chain hash of a list."""
    for value in values:
        state = mix(state, value)
    return state


def draw(state: int, seed: int, vocab_size: int) -> int:
    """The sample that a state and a seed give."""
    return mix(mix(state, seed), 7) // 1000 % vocab_size


@lru_cache(maxsize=100_000)
def next_token(tokens: tuple[int, ...], seed: int, vocab_size: int) -> int:
    """The definition, without pages."""
    state, layer = 1, []
    for position, token in enumerate(tokens):
        state = mix(state, token * 10_007 + position)
        layer.append(state)
    return draw(fold(layer), seed, vocab_size)


def expected(
    prompt: list[int], params: SamplingParams, seed: int, *, vocab_size: int, eos_ids: tuple[int, ...] = ()
) -> list[int]:
    """All tokens that a request must get, with the one that ends it; `stop` strings are not looked at."""
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)}
    tokens = tuple(prompt)
    while len(tokens) - len(prompt) < params.max_tokens:
        tokens += (next_token(tokens, seed, vocab_size),)
        if tokens[-1] in stops and len(tokens) - len(prompt) > params.min_tokens:
            break
    return list(tokens[len(prompt) :])


class Fault(RuntimeError):
    """What a device might say."""


def fault_at(*numbers: int) -> Callable[[int], None]:
    """For `FakeRunner(faults=...)`: raises at these launches, or (negative) collections."""

    def faults(number: int) -> None:
        if number in numbers:
            raise Fault("out of memory")

    return faults


class _Work:
    """A launched row: all that was true of its request at the launch."""

    def __init__(self, row: Row):
        request = row.request
        assert request.slot is not None
        self.slot = request.slot
        self.start, self.count, self.samples = row.start, row.count, row.samples
        self.drafts = row.drafts
        self.tokens = [*request.tokens(row.start, row.start + row.count), *row.drafts]
        self.pages, self.window_pages = list(request.pages), list(request.window_pages)
        self.seed = request.seed
        self.wants = request.params.logprobs is not None
        wanted = request.params.prompt_logprobs is not None
        self.prompt = request.prompt_ids[row.start + 1 : row.start + 1 + row.count] if wanted else None


class FakeRunner:
    """See the module's text. `faults(step_number)` may raise, at the launch or, for negative numbers, at the collection."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        vocab_size: int,
        asynchronous: bool = False,
        faults: Callable[[int], None] = lambda number: None,
        window: tuple[int, int] | None = None,
    ):
        self.window, window_pages = window or (0, 0)
        self.windowed = [[EMPTY] * page_size for _ in range(window_pages)]
        self.broken: list[str] = []
        self.page_size = page_size
        self.vocab_size = vocab_size
        self.asynchronous = asynchronous
        self.layers = [[[EMPTY] * page_size for _ in range(num_pages)] for _ in range(2)]
        self.latest: dict[int, int] = {}
        self.host: dict[int, list[list[int]]] = {}
        """What each page of host memory holds, a list a layer."""
        self.queue: list[tuple[int, list[_Work], Step]] = []
        self.results: dict[int, StepResult] = {}
        self.launched = 0
        self.faults = faults
        self.steps: list[list[tuple[str, int, int, int]]] = []
        """(id, index, start, count) of every row of every step launched."""

    def launch(self, step: Step) -> int:
        """Enqueue; an asynchronous runner runs it when something is collected."""
        self.launched += 1
        self.faults(self.launched)
        rows = [_Work(row) for row in step.rows]
        for row, work in zip(step.rows, rows, strict=True):
            drafted = len(row.drafts)
            assert work.start + work.count <= len(row.request) + drafted + (not drafted), "more than one token is not known"
            assert not drafted or work.start + work.count == len(row.request) + drafted, "drafts that follow nothing"
            assert len(work.pages) * self.page_size >= work.start + work.count, "a row writes beyond its pages"
        sources, destinations = {a for a, _ in step.copies}, [b for _, b in step.copies]
        assert len(set(destinations)) == len(destinations)
        assert not sources & set(destinations), "copies would depend on their order"
        self.steps.append([(r.request.id, r.request.index, r.start, r.count) for r in step.rows])
        written, read = {host for _, host in step.out}, {host for host, _ in step.back}
        assert not written & read, "a step reads a page of the host that it writes"
        assert len(written) == len(step.out), "two pages go to the same one"
        assert len({page for _, page in step.back}) == len(step.back), "two pages come to the same one"
        self.queue.append((self.launched, rows, step))
        if not self.asynchronous:
            self._run()
        return self.launched

    def sample(self, ticket: int, words: int, fill: FillMasks) -> None:
        """Masks are `MaskedRunner`'s."""
        raise NotImplementedError("this runner takes no masks; use tests.engine.masked_runner")

    def collect(self, ticket: int) -> StepResult:
        """The result of a launch."""
        self.faults(-ticket)
        while self.queue and self.queue[0][0] <= ticket:
            self._run()
        return self.results.pop(ticket)

    def _run(self) -> None:
        ticket, rows, step = self.queue.pop(0)
        for page, host in step.out:
            self.host[host] = [list(layer[page]) for layer in self.layers]
        for host, page in step.back:
            for layer, cells in zip(self.layers, self.host[host], strict=True):
                layer[page] = list(cells)
        for source, destination in step.copies:
            if source < 0:
                self.windowed[~destination] = list(self.windowed[~source])
            for layer in self.layers if source >= 0 else ():
                layer[destination] = list(layer[source])
        for work in rows:
            if len(work.tokens) < work.count:
                work.tokens.append(self.latest[work.slot])
            cells = [token * 10_007 + work.start + i for i, token in enumerate(work.tokens)]
            self._write(0, work, cells)
            for position, cell in enumerate(cells, start=work.start) if self.window else ():
                self.windowed[work.window_pages[position // self.page_size]][position % self.page_size] = cell
        for work in rows if self.window else ():
            self._look_back(work)
        for work in rows:
            state, cells = 1, []
            for value in self._read(0, work):
                state = mix(state, value)
                cells.append(state)
            self._write(1, work, cells[work.start :])
        tokens = [self._sampled(i, work) for i, work in enumerate(rows)]
        for work, drawn in zip(rows, tokens, strict=True):
            if drawn:
                self.latest[work.slot] = drawn[-1]
        self.results[ticket] = StepResult.of(
            tokens,
            logprobs=[_logprob(t) if work.wants else None for work, drawn in zip(rows, tokens, strict=True) for t in drawn],
            prompt_logprobs=[None if w.prompt is None else [_logprob(t) for t in w.prompt] for w in rows],
        )

    def _look_back(self, work: _Work) -> None:
        """What the row's tokens see of the windowed layer is what layer 0 holds."""
        size, first = self.page_size, max(0, work.start - self.window + 1)
        for position, cell in enumerate(self._read(0, work)[first:], start=first):
            if self.windowed[work.window_pages[position // size]][position % size] != cell:
                self.broken.append(f"position {position} is seen from {work.start} on, and its page is gone")

    def _sampled(self, number: int, work: _Work) -> list[int]:
        """The samples of a row that count: up to the first that is not its draft."""
        if not work.samples:
            return []
        cells, drafts = self._read(1, work), len(work.drafts)
        drawn = [self.draw(number, i, fold(cells[: len(cells) - drafts + i]), work.seed) for i in range(drafts + 1)]
        return drawn[: agreed(work.drafts, drawn)]

    def draw(self, row: int, sample: int, state: int, seed: int) -> int:
        """Sample number `sample` of a row."""
        return draw(state, seed, self.vocab_size)

    def _write(self, layer: int, work: _Work, cells: list[int]) -> None:
        for position, cell in enumerate(cells, start=work.start):
            self.layers[layer][work.pages[position // self.page_size]][position % self.page_size] = cell

    def _read(self, layer: int, work: _Work) -> list[int]:
        cells = [cell for page in work.pages for cell in self.layers[layer][page]]
        return cells[: work.start + work.count]


def _logprob(token: int) -> TokenLogprobs:
    return TokenLogprobs(token_id=token, logprob=-token / 16, rank=token + 1, top=((0, 0.0),))
