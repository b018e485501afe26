"""`LLM`: a language model or encoder inside a Python program. (The server uses `Engine` directly.)

    llm = LLM("bookworm")
    print(llm.generate("Once upon a time", SamplingParams(max_tokens=50))[0].outputs[0].text)
    print(llm.embed(["Once upon a time", "It was dark"]).shape)

A prompt that does not fit the model together with its max_tokens is an error; nothing is ever cut off. Do not use an `LLM`
from several threads, nor call `generate` or `stream` inside another one: each of them consumes all results of the engine.
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
"""Requests that run at once on a CPU. With 256 a step takes 3.4 times as long and makes only a sixth more tokens per second
(bookworm, 35 and 118 ms)."""
CPU_STEP_TOKENS = 256
"""Tokens of one pass on a CPU. 2000 tokens of a small model take about a second; requests that generate beside a long prompt
wait for such a step."""


class LLM:
    """A loaded model.

    Attributes: `engine`, `tokenizer`, `config` (of the model) and `plan` (the loader's decisions; None for an encoder).
    """

    plan: Any

    def __init__(self, model: str = "bookworm", *, progress: Callable[[str], None] | None = None, **options: Any):
        """Load a model: the embedded one by its name, a folder, or a name on the Hugging Face hub.

        `options` are the other fields of `EngineConfig`. `progress` is called with a sentence before each slow step.
        """
        options_of = EngineConfig(model=str(model), **options)
        encoder = _encoder(options_of)
        self.generates = encoder is None
        """False for an encoder, which computes embeddings and scores only."""
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
        """Computes embeddings and scores; None if the model has none. Raises ModelError if its folder names unknown pooling."""
        return self._make_pooler()

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | None = None,
    ) -> list[Completion]:
        """Generate text for each prompt.

        Args:
            prompts: a text or several, or several lists of token ids.
            params: sampling parameters for all prompts, or one for each.
            adapter: name of the LoRA adapter to use for all prompts; `params` can name one for each prompt instead.

        Returns:
            A completion for each prompt, in the same order. If the model fails, the completions in question end with
            finish_reason "error". Ctrl-C aborts all of them.

        Raises:
            ValueError: a prompt is refused. Prompts that have already started are then aborted.
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
        """The text of one prompt in pieces, as it is generated. Leaving the iterator early aborts the request.

        Raises:
            ValueError: at the first `next`, if the prompt is refused.
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
        """Embeddings of texts, or of lists of token ids: float32 [texts, dimensions].

        The model's folder specifies how tokens are pooled and whether embeddings are normalised (docs/embeddings.md).
        `dimensions` keeps only the first numbers of each embedding, for models that were trained for that.

        Raises:
            ValueError: a text is empty or too long, or the model has no embeddings, or none of that size.
        """
        pooler = self._need_pooler()
        pooler.pooled.check_dimensions(dimensions)
        many = [texts] if isinstance(texts, str) else texts
        return pooler.run_all([self._text(text) for text in many], dimensions=dimensions)

    def score(self, queries: str | Sequence[str], documents: str | Sequence[str]) -> list[float]:
        """How well each document fits its query; a single query is used for all documents.

        An encoder with a one-label classification head reads query and document together and returns 0 to 1, unless its folder
        specifies otherwise. For any other model the score is the cosine of two embeddings.

        Raises:
            ValueError: the number of queries is neither one nor the number of documents, a text is too long, or the model's
                head is not for scores.
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
        """Load the LoRA adapter in a folder under a name. The model must have been loaded with `max_adapters`.

        Raises:
            ValueError: there is no room, or the name is taken or invalid; ModelError: the folder cannot be used.
        """
        adapters = self.engine.adapters
        if adapters is None:
            raise ValueError("there is no room for adapters: load the model with max_adapters")
        self.engine.hold_adapter(name, adapters.read(folder), str(folder))

    def unload_adapter(self, name: str) -> None:
        """Remove an adapter. Unfinished requests that use it continue with it to their end. Raises UnknownAdapter."""
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
        """Submit requests from the queue until the engine's waiting line is full."""
        while queue:
            prompt_ids, params = queue[0]
            try:
                name = self.engine.submit(prompt_ids, params, whole=True)
            except QueueFull:
                if not self.engine.has_work:
                    raise  # the engine is idle: n samples are more than may ever wait, so no step would make room
                return
            queue.popleft()
            yield name, Transcript(prompt_ids, params.n)


def _load(options: EngineConfig, progress: Callable[[str], None] | None, model: Any = None) -> "Loaded":
    from tilewright.engine.loading import load  # imports torch

    return load(options.model if model is None else model, options, progress)


def _encoder(options: EngineConfig) -> "LoadedEncoder | None":
    """The encoder that the options name; None if they name a decoder or nothing."""
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

    `model` takes precedence over `options.model`; a `ModelConfig` gives random weights of that shape, for measurements.
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
