"""`LLM`: a model that is ready to generate, for a program that owns it. A server stands on `Engine` instead.

    llm = LLM("bookworm")
    print(llm.generate("Once upon a time", SamplingParams(max_tokens=50))[0].outputs[0].text)
    print(llm.embed(["Once upon a time", "It was dark"]).shape)

A prompt that does not fit the model together with its max_tokens is an error; nothing is ever cut off. Not for several threads,
nor for one `generate` or `stream` inside another: each takes all deltas of the engine.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.engine.adapter_names import UnknownAdapter
from tilewright.engine.config import EngineConfig
from tilewright.engine.core import Engine
from tilewright.engine.draft_model import DraftModel
from tilewright.engine.outputs import Completion, EngineStats, Transcript
from tilewright.engine.pooling import Text
from tilewright.engine.request import Delta, QueueFull, SamplingParams
from tilewright.engine.rules import FromGrammar
from tilewright.engine.schedule import Scheduler
from tilewright.engine.speculation import FromText, Proposer
from tilewright.engine.tokenizer import Tokenizer
from tilewright.engine.windows import page_pools

if TYPE_CHECKING:
    import numpy as np

    from tilewright.engine.loading import Loaded  # imports torch
    from tilewright.engine.pooler import LoadedEncoder, Pooler

__all__ = ["LLM", "Engine", "EngineConfig", "EngineStats", "load_engine"]

Prompt = str | list[int]

CPU_SEQS = 64
"""Requests that run at once on a CPU: with 256 a step takes 3.4 times as long and makes only a sixth more tokens a second
(bookworm, 35 and 118 ms)."""
CPU_STEP_TOKENS = 256
"""Tokens of one pass on a CPU, which takes about a second for 2000 of a small model: whoever generates beside a long prompt
waits for such a step."""


class LLM:
    """A loaded model. Attributes: `engine`, `tokenizer`, `config` (the model's), `plan` (what the loader decided; of an encoder
    None)."""

    plan: Any

    def __init__(self, model: str = "bookworm", *, progress: Callable[[str], None] | None = None, **options: Any):
        """Load a model: the embedded one by its name, a folder, or a name on the Hugging Face hub.

        `options` are the other fields of `EngineConfig`; `progress` is told in words what takes time.
        """
        options_of = EngineConfig(model=str(model), **options)
        encoder = _encoder(options_of)
        self.generates = encoder is None
        """False for an encoder, which has embeddings and scores alone."""
        if encoder is not None:
            self.config, self.plan = encoder.model.config, None
            self.tokenizer, self.engine = encoder.tokenizer, encoder.engine
            self._make_pooler: Callable[[], Pooler | None] = lambda: encoder.pooler
            return
        loaded = _load(options_of, progress)
        self.config, self.plan = loaded.config, loaded.plan
        assert loaded.tokenizer_path is not None, "a model by name has a folder"
        self.tokenizer = loaded.tokenizer or Tokenizer.load(loaded.tokenizer_path)
        self.engine = _engine(options_of, loaded, self.tokenizer)
        self._make_pooler = lambda: _pooler(options_of, loaded)

    @cached_property
    def pooler(self) -> "Pooler | None":
        """Embeddings and scores; None where the model has none. Raises ModelError where its folder pools in another way."""
        return self._make_pooler()

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | None = None,
    ) -> list[Completion]:
        """Completions of all prompts (texts or token ids), in their order. `params` is for all of them, or one for each.

        adapter: the name of the LoRA adapter that all of them have, as `params` may say of each.

        A failure of the model ends as finish_reason "error" of the completions that it hit. An interrupt aborts everything.

        Raises:
            ValueError: a prompt is refused; none of them has been started then, or those that were are aborted.
        """
        self._check_generates()
        texts: Sequence[Prompt] = [prompts] if isinstance(prompts, str) else prompts
        each = [params or SamplingParams()] * len(texts) if not isinstance(params, Sequence) else params
        if len(each) != len(texts):
            raise ValueError(f"params has {len(each)} entries for {len(texts)} prompts, wanted one for all or one for each")
        if adapter is not None:
            each = [replace(one, adapter=adapter) for one in each]
        queue = deque((self._encode(prompt), param) for prompt, param in zip(texts, each))
        by_id: dict[str, Transcript] = {}
        try:
            while queue or self.engine.has_work:
                by_id.update(self._submit(queue))
                for delta in self.engine.step():
                    if delta.request_id in by_id:
                        by_id[delta.request_id].add(delta)
        except BaseException:
            self.engine.reset()
            raise
        return [transcript.completion() for transcript in by_id.values()]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """Deltas of one prompt as they are made; leaving the iterator early aborts the rest.

        Raises ValueError at the first `next` if the prompt is refused.
        """
        self._check_generates()
        params = params or SamplingParams()
        name = self.engine.submit(self._encode(prompt), params)
        unfinished = params.n
        try:
            while unfinished:
                for delta in self.engine.step():
                    if delta.request_id == name:
                        unfinished -= delta.finish_reason is not None
                        yield delta
        except GeneratorExit:
            self.engine.abort(name)
            raise
        except BaseException:
            self.engine.reset()
            raise

    def embed(self, texts: str | Sequence[str] | Sequence[list[int]], *, dimensions: int | None = None) -> "np.ndarray":
        """Embeddings of texts, or of lists of token ids: float32 [texts, numbers].

        How tokens are pooled, and whether embeddings have the length 1, the model's folder says (docs/embeddings.md).
        `dimensions`: so many of the numbers, of models that were trained to be cut.

        Raises:
            ValueError: a text is empty or too long, or the model has no embeddings of that size, or none.
        """
        pooler = self._need_pooler()
        pooler.pooled.check_dimensions(dimensions)
        many = [texts] if isinstance(texts, str) else texts
        return pooler.run_all([self._text(text) for text in many], dimensions=dimensions)

    def score(self, queries: str | Sequence[str], documents: str | Sequence[str]) -> list[float]:
        """How well each document fits its query; one query may stand for all.

        An encoder with a head of one label reads both together, and gives 0 to 1 where its folder says nothing else. Of any
        other model it is the cosine of two embeddings.

        Raises:
            ValueError: the numbers of texts do not fit, a text is too long, or the model's head is not for scores.
        """
        from tilewright.engine.pairs import scores

        pooler = self._need_pooler()
        asked = [queries] if isinstance(queries, str) else list(queries)
        return scores(pooler, self.tokenizer, asked, [documents] if isinstance(documents, str) else list(documents))

    def _need_pooler(self) -> "Pooler":
        if self.pooler is None:
            raise ValueError("embeddings are not supported with latent attention, nor with tp, pp and slices")
        return self.pooler

    def _text(self, text: Prompt) -> Text:
        ids = self._encode(text)
        assert self.pooler is not None
        self.pooler.pooled.check(ids)
        return Text(ids)

    def _check_generates(self) -> None:
        if not self.generates:
            raise ValueError("this model is an encoder, which generates no text; wanted embed or score")

    def load_adapter(self, name: str, folder: str | Path) -> None:
        """Hold the LoRA adapter in a folder under a name, where the model was loaded with room (`max_adapters`).

        Raises:
            ValueError: there is no room, the name is taken or is none, or (ModelError) the folder cannot be taken.
        """
        adapters = self.engine.adapters
        if adapters is None:
            raise ValueError("there is no room for adapters: load the model with max_adapters")
        self.engine.hold_adapter(name, adapters.read(folder), str(folder))

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; unfinished requests that have it end with it. Raises UnknownAdapter."""
        if self.engine.adapters is None:
            raise UnknownAdapter(f"there is no adapter {name!r} here")
        self.engine.adapters.remove(name)

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if not isinstance(prompt, Sequence):
            raise ValueError(f"a prompt is {prompt!r}, wanted a text or a list of token ids (and a list of such for several)")
        return list(prompt)

    def _submit(self, queue: deque[tuple[list[int], SamplingParams]]) -> Iterator[tuple[str, Transcript]]:
        """Submits from the queue as long as the engine lets more wait."""
        while queue:
            prompt_ids, params = queue[0]
            try:
                name = self.engine.submit(prompt_ids, params, whole=True)
            except QueueFull:
                if not self.engine.has_work:
                    raise  # no step makes room for n samples where so many may never wait
                return
            queue.popleft()
            yield name, Transcript(prompt_ids, params.n)


def _load(options: EngineConfig, progress: Callable[[str], None] | None, model: Any = None) -> "Loaded":
    from tilewright.engine.loading import load  # imports torch

    return load(options.model if model is None else model, options, progress)


def _encoder(options: EngineConfig) -> "LoadedEncoder | None":
    """The encoder that the options name; None where they name a decoder, or nothing."""
    from tilewright.models import resolve
    from tilewright.models.encoders import is_encoder

    folder = resolve(options.model)
    if not is_encoder(folder):
        return None
    from tilewright.engine.pooler import load_pooled_encoder

    return load_pooled_encoder(folder, options, cpu_pass_tokens=CPU_STEP_TOKENS)


def _pooler(options: EngineConfig, loaded: "Loaded") -> "Pooler | None":
    from tilewright.engine.pooler import decoder_pooler

    tokens = options.max_tokens_per_step
    return decoder_pooler(loaded, options, pass_tokens=tokens if loaded.runner.asynchronous else min(tokens, CPU_STEP_TOKENS))


def load_engine(model: str | Path | Any, options: EngineConfig, progress: Callable[[str], None] | None = None) -> Engine:
    """An engine without a tokenizer: token ids in, token ids out.

    `model` overrules `options.model`; a `ModelConfig` gives random weights of that shape, for measurements.
    """
    loaded = _load(options, progress, model)
    return _engine(options, loaded, None)


def _engine(options: EngineConfig, loaded: "Loaded", tokenizer: Tokenizer | None) -> Engine:
    step_tokens, seqs = options.max_tokens_per_step, options.max_seqs
    if not loaded.runner.asynchronous:  # a CPU
        step_tokens, seqs = min(step_tokens, CPU_STEP_TOKENS), min(seqs, CPU_SEQS)
    scheduler = Scheduler(
        **page_pools(loaded.plan, prefix_cache=options.prefix_cache),
        max_seqs=seqs,
        max_tokens_per_step=step_tokens,
        max_model_len=loaded.plan.max_model_len,
        max_waiting=options.max_waiting,
        prefill_chunk=options.prefill_chunk,
        max_samples=options.max_samples,
    )
    eos_ids = loaded.config.eos_token_ids if tokenizer is None else tokenizer.eos_ids
    proposer: Proposer | None = None
    if loaded.draft is not None:
        proposer = DraftModel(loaded.draft, max_seqs=seqs, most_tokens=step_tokens, head=loaded.draft_head)
    elif options.speculate is not None:
        proposer = FromText(seqs) if options.speculate == "ngram" else FromGrammar()
    return Engine(
        loaded.runner, tokenizer, eos_ids, scheduler, vocab_size=loaded.config.vocab_size, proposer=proposer,
        draft_tokens=options.draft_tokens, adapters=loaded.adapters,
    )  # fmt: skip
