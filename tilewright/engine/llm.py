"""`LLM`: a model that is ready to generate, for a program that owns it. A server stands on `Engine` instead.

    llm = LLM("bookworm")
    print(llm.generate("Once upon a time", SamplingParams(max_tokens=50))[0].outputs[0].text)

A prompt that does not fit the model together with its max_tokens is an error; nothing is ever cut off. Not for several threads,
nor for one `generate` or `stream` inside another: each takes all deltas of the engine.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.engine.adapter_names import UnknownAdapter
from tilewright.engine.blocks import BlockPool
from tilewright.engine.config import EngineConfig
from tilewright.engine.core import Engine
from tilewright.engine.outputs import Completion, EngineStats, Transcript
from tilewright.engine.request import Delta, QueueFull, SamplingParams
from tilewright.engine.schedule import Scheduler
from tilewright.engine.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tilewright.engine.loading import Loaded  # imports torch

__all__ = ["LLM", "Engine", "EngineConfig", "EngineStats", "load_engine"]

Prompt = str | list[int]

CPU_SEQS = 64
"""Requests that run at once on a CPU: with 256 a step takes 3.4 times as long and makes only a sixth more tokens a second
(bookworm, 35 and 118 ms)."""
CPU_STEP_TOKENS = 256
"""Tokens of one pass on a CPU, which takes about a second for 2000 of a small model: whoever generates beside a long prompt
waits for such a step."""


class LLM:
    """A loaded model. Attributes: `engine`, `tokenizer`, `config` (the model's), `plan` (what the loader decided)."""

    def __init__(self, model: str = "bookworm", *, progress: Callable[[str], None] | None = None, **options: Any):
        """Load a model: the embedded one by its name, a folder, or a name on the Hugging Face hub.

        `options` are the other fields of `EngineConfig`; `progress` is told in words what takes time.
        """
        options_of = EngineConfig(model=str(model), **options)
        loaded = _load(options_of, progress)
        self.config, self.plan = loaded.config, loaded.plan
        assert loaded.tokenizer_path is not None, "a model by name has a folder"
        self.tokenizer = loaded.tokenizer or Tokenizer.load(loaded.tokenizer_path)
        self.engine = _engine(options_of, loaded, self.tokenizer)

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
                name = self.engine.submit(prompt_ids, params)
            except QueueFull:
                if not self.engine.has_work:
                    raise  # no step makes room for n samples where so many may never wait
                return
            queue.popleft()
            yield name, Transcript(prompt_ids, params.n)


def _load(options: EngineConfig, progress: Callable[[str], None] | None, model: Any = None) -> "Loaded":
    from tilewright.engine.loading import load  # imports torch

    return load(options.model if model is None else model, options, progress)


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
        blocks=BlockPool(loaded.plan.num_pages, loaded.plan.page_size, prefix_cache=options.prefix_cache),
        max_seqs=seqs,
        max_tokens_per_step=step_tokens,
        max_model_len=loaded.plan.max_model_len,
        max_waiting=options.max_waiting,
        prefill_chunk=options.prefill_chunk,
    )
    eos_ids = loaded.config.eos_token_ids if tokenizer is None else tokenizer.eos_ids
    return Engine(
        loaded.runner, tokenizer, eos_ids, scheduler, vocab_size=loaded.config.vocab_size, adapters=loaded.adapters
    )  # fmt: skip
