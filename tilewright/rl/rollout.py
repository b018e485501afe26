"""The sampler's side of a policy: the serving engine on the trainer's own parameters, in the same process, without a copy.

The engine reads the tensors that the optimizer writes, so a sample is always of the newest weights. Nothing is cached between
calls: keys and values of older weights would be wrong.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tilewright.engine.blocks import BlockPool
from tilewright.engine.config import EngineConfig
from tilewright.engine.core import Engine
from tilewright.engine.loading import runner_of
from tilewright.engine.outputs import CompletionOutput, Transcript
from tilewright.engine.plan import plan_memory
from tilewright.engine.request import SamplingParams
from tilewright.engine.schedule import Scheduler
from tilewright.models import Model

__all__ = ["Answer", "Sampler"]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the policy said to a prompt: its tokens with the one that ended it, and the log-probability of each."""

    tokens: list[int]
    logprobs: list[float]
    truncated: bool


class Sampler:
    """Samples from `model`, whose tensors stay the caller's.

    max_len: tokens of a prompt and its answer together. seqs: samples decoded at once. end_ids: tokens that end an answer.

    Raises:
        NoMemory: the cache of `seqs` sequences does not fit.
        ValueError: `max_len` is beyond what the model was made for.
    """

    def __init__(self, model: Model, *, max_len: int, seqs: int, end_ids: tuple[int, ...], invariant: bool = False) -> None:
        device = next(model.parameters()).device
        dtype = next(model.parameters()).dtype
        options = EngineConfig(
            device=str(device),
            max_model_len=max_len,
            max_seqs=seqs,
            prefix_cache=False,
            invariant=invariant,
            max_waiting=1 << 20,
        )
        plan = plan_memory(model, options, device=device, dtype=dtype)
        runner = runner_of(model, plan.num_pages, plan.max_model_len, options)
        runner.warmup(lambda words: None)
        scheduler = Scheduler(
            blocks=BlockPool(plan.num_pages, plan.page_size, prefix_cache=False),
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
        """`answers` answers to each prompt, at temperature 1. The same seed, prompts and weights give the same answers.

        places: of each prompt among all that are sampled with this seed; what is drawn depends on seed, place and position in
            the sequence. Default: prompt i has place i * answers.

        Raises:
            ValueError: a prompt and `max_tokens` do not fit.
            RuntimeError: the engine failed on a request.
        """
        transcripts: dict[str, Transcript] = {}
        with torch.no_grad():
            for index, prompt in enumerate(prompts):
                place = index * answers if places is None else places[index]
                params = SamplingParams(max_tokens=max_tokens, logprobs=0, n=answers, seed=(seed << 24) + place)
                name = self._engine.submit(list(prompt), params, f"{seed}-{index}")
                transcripts[name] = Transcript(list(prompt), answers)
            while self._engine.has_work:
                for delta in self._engine.step():
                    transcripts[delta.request_id].add(delta)
        return [[_answer(output) for output in transcript.completion().outputs] for transcript in transcripts.values()]


def _answer(output: CompletionOutput) -> Answer:
    if output.finish_reason not in ("stop", "length") or output.logprobs is None:
        raise RuntimeError(f"the engine ended an answer with {output.finish_reason}: {output.error}")
    return Answer(
        tokens=output.token_ids,
        logprobs=[entry.logprob for entry in output.logprobs],
        truncated=output.finish_reason == "length",
    )
