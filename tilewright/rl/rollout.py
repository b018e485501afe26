"""The sampler's side of a policy: the serving engine in the trainer's process, with the trainer's own parameters, not a copy.

The engine reads the tensors that the optimizer writes, so a sample always comes from the newest weights. The answers to one
prompt share the prompt's pages of the KV cache. Nothing is cached between calls, because the keys and values of older weights
would be wrong. A sampler process (sampler_process.py) uses the same class with its own copy of the parameters.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch

from tilewright.engine.config import EngineConfig
from tilewright.engine.core import Engine
from tilewright.engine.loading import runner_of
from tilewright.engine.plan import plan_memory
from tilewright.engine.request import SamplingParams
from tilewright.engine.runner import ModelRunner
from tilewright.engine.schedule import Scheduler
from tilewright.engine.windows import page_pools
from tilewright.hw.revocable import Revocable
from tilewright.models import Model
from tilewright.nn import KVCache
from tilewright.rl.output_collector import Output, OutputCollector

__all__ = ["Answer", "Drawing", "Sampler", "Samples"]

_ALIGNMENT = 512
_PAGE, _LONG = 32, 256
"""Page size in tokens, for samples that may be at least `_LONG` tokens long. The copy engine fetches keys page by page, and
small pages keep it busy."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer of the policy to a prompt.

    tokens: the tokens of the answer, including the one that ended it.
    logprobs: the log-probability of each token in the distribution from which it was drawn.
    kept: for each token, how many tokens the filters left to draw from; 0: all.
    whole: the log-probability of each token in the model's own distribution, at temperature 1 over the whole vocabulary.
    truncated: whether the answer was cut off at a limit.
    version: the version of the weights.
    """

    tokens: list[int]
    logprobs: list[float]
    kept: list[int]
    whole: list[float]
    truncated: bool
    version: int = 0


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """Sampling settings, in the order in which they apply: temperature, top-k (0: off), top-p (1: off)."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def filters(self) -> bool:
        """Whether some tokens can never be drawn."""
        return self.top_k > 0 or self.top_p < 1

    @property
    def plain(self) -> bool:
        """Whether tokens are drawn from the model's own distribution."""
        return self.temperature == 1.0 and not self.filters


class Samples(Protocol):
    """The interface of a sampler, in this process or in another one."""

    def __call__(
        self, prompts: Sequence[Sequence[int]], *, answers: int, max_tokens: int, seed: int, places: Sequence[int] | None = None
    ) -> list[list[Answer]]:
        """As `Sampler`."""
        ...


class Sampler:
    """Samples from `model`. The tensors of the model still belong to the caller.

    max_len: greatest number of tokens in a prompt and its answer together.
    seqs: number of samples that are decoded at the same time.
    end_ids: tokens that end an answer.
    cache_bytes: memory for keys and values; None: all memory that is left. If it is too small for all samples, some of them
    wait or start again.
    shares: whether the memory of the cache can be given back between calls (`give_back`). The next call takes it again.

    Raises:
        NoMemory: the cache for `seqs` sequences does not fit.
        ValueError: `max_len` is longer than the model supports.
    """

    def __init__(
        self, model: Model, *, max_len: int, seqs: int, end_ids: tuple[int, ...], invariant: bool = False,
        drawing: Drawing = Drawing(), cache_bytes: int | None = None, shares: bool = False,
    ) -> None:  # fmt: skip
        self.drawing = drawing
        self.version = 0
        """Version of the weights. The owner of the weights sets it; it is copied into the answers."""
        device = next(model.parameters()).device
        dtype = next(model.parameters()).dtype
        options = EngineConfig(
            device=str(device),
            max_model_len=max_len,
            max_seqs=seqs,
            invariant=invariant,
            page_size=_PAGE if max_len >= _LONG and model.config.latent is None else None,
            kv_cache_bytes=cache_bytes,
            max_waiting=1 << 20,
        )
        plan = plan_memory(model, options, device=device, dtype=dtype)
        runner = runner_of(
            model, plan.num_pages, plan.max_model_len, options, window_pages=plan.window_pages,
            explains_draws=not drawing.plain, columns=True,
        )  # fmt: skip
        self._memory: Revocable | None = None
        self.taking_s = 0.0
        """Seconds that the last call needed to get the memory of the cache back."""
        if shares:
            self._memory = _made_revocable(runner)
        runner.warmup(lambda words: None)
        scheduler = Scheduler(
            **page_pools(plan),
            max_seqs=seqs,
            max_tokens_per_step=options.max_tokens_per_step,
            max_model_len=plan.max_model_len,
            max_waiting=options.max_waiting,
            prefill_chunk=None,
        )
        self._engine = Engine(runner, None, end_ids, scheduler, vocab_size=model.config.vocab_size)

    def __call__(
        self, prompts: Sequence[Sequence[int]], *, answers: int, max_tokens: int, seed: int, places: Sequence[int] | None = None
    ) -> list[list[Answer]]:
        """Sample `answers` answers to each prompt. The same seed, prompts and weights give the same answers.

        places: index of each prompt among all prompts that are sampled with this seed. A draw depends on the seed, the index
            and the position in the sequence. Default: prompt i has index i * answers.

        Raises:
            ValueError: a prompt and `max_tokens` do not fit.
            RuntimeError: the engine failed on a request.
        """
        drawing, collector = self.drawing, OutputCollector()
        if self._memory is not None:
            self.taking_s = self._memory.take()
        self._engine.reset()  # remove the cached keys and values of older weights
        with torch.no_grad():
            for index, prompt in enumerate(prompts):
                first = index * answers
                params = SamplingParams(
                    max_tokens=max_tokens, logprobs=0, n=answers, temperature=drawing.temperature, top_k=drawing.top_k,
                    top_p=drawing.top_p, seed=(seed << 24) + (first if places is None else places[index]),
                )  # fmt: skip
                self._engine.submit(list(prompt), params, f"{seed}-{index}", streams=range(first, first + answers))
            while self._engine.has_work:
                collector.add(self._engine.advance())
        found = [_answer(output, drawing, self.version) for output in collector.outputs(len(prompts) * answers)]
        return [found[first : first + answers] for first in range(0, len(found), answers)]

    def give_back(self) -> tuple[int, float]:
        """Give the memory of the cache back until the next call, if `shares` is set. Returns (number of bytes, seconds it
        took)."""
        return (0, 0.0) if self._memory is None else (self._memory.nbytes, self._memory.give_back())


def _made_revocable(runner: ModelRunner) -> Revocable:
    """Move a runner's cache into memory that can be given back. Call this before graphs are captured, while only the runner
    refers to the cache's tensors."""
    cache = runner.cache
    kind, shapes = (
        type(cache),
        {
            field.name: [(x.shape, x.dtype) for x in getattr(cache, field.name)]
            for field in fields(cache)
            if field.name != "windowed"
        },
    )
    given: dict[str, Any] = {"windowed": cache.windowed} if isinstance(cache, KVCache) else {}
    runner.cache = cache = KVCache(k=(), v=())  # free the old cache before the same amount is allocated again
    sizes = [-(-shape.numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT for made in shapes.values() for shape, dtype in made]
    memory = Revocable(sum(sizes), runner.device)
    parts = iter(memory.memory.split(sizes))
    given |= {
        name: tuple(next(parts)[: shape.numel() * dtype.itemsize].view(dtype).view(shape) for shape, dtype in made)
        for name, made in shapes.items()
    }
    runner.cache = kind(**given)
    return memory


def _answer(output: Output, drawing: Drawing, version: int) -> Answer:
    if output.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"the engine ended an answer with finish reason {output.finish_reason}: {output.error}")
    return Answer(
        tokens=output.tokens,
        logprobs=output.logprobs if drawing.plain else output.drawn,
        kept=output.kept if drawing.filters else [0] * len(output.tokens),
        whole=output.logprobs,
        truncated=output.finish_reason == "length",
        version=version,
    )
