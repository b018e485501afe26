"""`python -m tests.engine.traffic --seconds 60 --device cuda --invariant`: mixed traffic straight into an engine, checked.

The embedded model, without a server around it. Each request of a fixed list is first answered alone: its reference. Then
sixteen are under way at once, drawn at random, some aborted on their way, with a cache that is too small for them. An
answer that comes to its end must be the reference's: its tokens, its text, its finish reason; with `--invariant` every bit of
its log-probabilities, too. At the end no page is held.

Exit code 0: all of it held; 1: something did not, and the last lines say what.
"""

import argparse
import random
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from tilewright.engine.llm import LLM
from tilewright.engine.request import SamplingParams

__all__ = ["Summary", "traffic"]

UNDER_WAY = 16
SIZES = {"max_seqs": 8, "kv_cache_bytes": 1_500_000, "max_model_len": 320, "max_tokens_per_step": 256}
_STORY = "The captain looked at the sea and said to the old man, who had been with him since the beginning of the voyage, "
PROMPTS = ("Call me", _STORY, _STORY + "that night ", _STORY * 4, "été", "It was")
DRAWS: tuple[dict[str, Any], ...] = (
    {"temperature": 0}, {"temperature": 0.9, "seed": 7}, {"seed": 8, "top_p": 0.8, "top_k": 40},
    {"temperature": 0.8, "seed": 9, "min_p": 0.05, "repetition_penalty": 1.2},
    {"temperature": 0, "frequency_penalty": 0.6, "presence_penalty": 0.3},
)  # fmt: skip
EXTRAS: tuple[dict[str, Any], ...] = (
    {}, {"stop": ("the", ". ")}, {"prompt_logprobs": 1}, {"n": 2, "seed": 5}, {"min_tokens": 8, "logit_bias": {5: 2.0}},
)  # fmt: skip

Answer = dict[int, list[Any]]
"""By the index of a sample: its tokens, text, log-probabilities and finish reason."""


@dataclass
class Summary:
    """What a run found."""

    answers: int = 0
    aborted: int = 0
    wrong: list[str] = field(default_factory=list)
    preemptions: int = 0
    hit_tokens: int = 0
    pages_used: int = -1


class _Traffic:
    def __init__(self, llm: LLM, seed: int, *, exact: bool):
        self.engine, self.rng, self.exact = llm.engine, random.Random(seed), exact
        tokens = [llm.tokenizer.encode(prompt) for prompt in PROMPTS]
        self.requests = [
            (tokens[place], SamplingParams(max_tokens=(24, 60, 120)[(place + turn) % 3], logprobs=2, **drawn | extra))
            for place in range(len(PROMPTS))
            for turn, drawn in enumerate(DRAWS)
            for extra in (EXTRAS[(place * 2 + turn) % 5],)
        ]
        self.found: dict[str, Answer] = defaultdict(dict)
        self.summary = Summary()

    def step(self) -> None:
        """One step of the engine; what it brings goes to `found`."""
        for delta in self.engine.step():
            answer = self.found[delta.request_id].setdefault(delta.index, [[], "", [], None])
            answer[0] += delta.token_ids
            answer[1] += delta.text
            if self.exact:
                entries = [*(delta.prompt_logprobs or ()), *delta.logprobs]
                answer[2] += [(entry.token_id, entry.logprob, entry.rank) for entry in entries]
            answer[3] = delta.finish_reason

    def alone(self) -> list[Answer]:
        """The reference of each request."""
        found = []
        for prompt, params in self.requests:
            name = self.engine.submit(prompt, params)
            while self.engine.has_work:
                self.step()
            found.append(self.found.pop(name))
        return found

    def run(self, seconds: float) -> Summary:
        """References, then traffic for so long, then the end."""
        references, end_s = self.alone(), time.monotonic() + seconds
        before = self.engine.stats()
        places: dict[str, int] = {}
        while places or time.monotonic() < end_s:
            while len(places) < UNDER_WAY and time.monotonic() < end_s:
                place = self.rng.randrange(len(self.requests))
                places[self.engine.submit(*self.requests[place])] = place
            self.step()
            if places and self.rng.random() < 0.02:
                name = self.rng.choice(list(places))
                self.engine.abort(name)
                self.found.pop(name, None)
                del places[name]
                self.summary.aborted += 1
            for name in [name for name in self.found if not self.engine.scheduler.live(name)]:
                answer = self.found.pop(name)
                place = places.pop(name, None)  # None: the last words of an aborted one
                if place is not None:
                    self._judge(place, answer, references[place])
        while self.engine.has_work:
            self.step()
        stats = self.engine.stats()
        self.summary.preemptions = stats.preemptions - before.preemptions
        self.summary.hit_tokens = stats.prefix_hit_tokens - before.prefix_hit_tokens
        self.summary.pages_used = stats.pages_used
        return self.summary

    def _judge(self, place: int, got: Answer, want: Answer) -> None:
        self.summary.answers += 1
        if got != want:
            self.summary.wrong.append(f"request {place}: got {got!r:.400}, alone it was {want!r:.400}")


def traffic(seconds: float, *, seed: int = 0, invariant: bool = False, **options: Any) -> Summary:
    """Load the model, send traffic for so long, and say what was found. `options` are fields of `EngineConfig`."""
    llm = LLM("bookworm", invariant=invariant, **SIZES, **options)
    return _Traffic(llm, seed, exact=invariant).run(seconds)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.engine.traffic", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--invariant", action="store_true", help="so that no bit depends on company, and compare every bit")
    given = parser.parse_args()
    summary = traffic(given.seconds, seed=given.seed, invariant=given.invariant, device=given.device)
    print(
        f"{summary.answers:,} answers, {summary.aborted:,} aborted, {len(summary.wrong)} wrong; {summary.preemptions:,} "
        f"preemptions, {summary.hit_tokens:,} tokens from the prefix cache, {summary.pages_used} pages held at the end"
    )
    for line in summary.wrong[:5]:
        print(line)
    return int(bool(summary.wrong) or summary.pages_used != 0)


if __name__ == "__main__":
    sys.exit(main())
