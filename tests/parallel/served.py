"""Requests of the embedded model by a spread engine, with all numbers they bring. `served.py OPTIONS` prints them as JSON."""

import json
import sys
from dataclasses import asdict
from typing import Any

from tilewright.engine.llm import LLM
from tilewright.engine.request import SamplingParams

__all__ = ["answers"]

PROMPTS = ("The captain looked at the sea and", "The captain looked at the door, and at the door, and at the", "It was")
PARAMS = (
    SamplingParams(max_tokens=16, temperature=0, logprobs=2),
    SamplingParams(max_tokens=16, seed=7, logprobs=1, prompt_logprobs=1, n=2),
    SamplingParams(max_tokens=16, seed=8, temperature=0.8, top_k=50, repetition_penalty=1.2, logprobs=0),
)


def answers(**options: Any) -> list[dict[str, Any]]:
    """Ids, log-probabilities and texts of each request; all at once, then the first again: from the cache."""
    llm = LLM("bookworm", device="cpu", max_tokens_per_step=64, max_seqs=8, kv_cache_bytes=1 << 24, **options)
    found = [*llm.generate(PROMPTS, PARAMS), *llm.generate(PROMPTS[:1], PARAMS[:1])]
    return json.loads(json.dumps([asdict(one) for one in found]))


if __name__ == "__main__":
    print(json.dumps(answers(**json.loads(sys.argv[1]))))
