"""The engine process of `tilewright bench served`: an engine that is first measured alone and then serves.

`python -m tilewright.bench.served_engine SPEC NOTES FOLDER CONTROL`: SPEC is JSON (model, options of the engine, streams,
tokens in and out, runs). The results of the engine alone are written into NOTES; for them it runs as in `tilewright bench
engine`: all requests at once, step after step, and nothing else in the process.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from tilewright.bench.front_engine import words
from tilewright.bench.front_server import quantiles_ms
from tilewright.engine.config import EngineConfig
from tilewright.engine.core import Engine
from tilewright.engine.llm import LLM, load_engine
from tilewright.engine.request import SamplingParams
from tilewright.models import SHAPES
from tilewright.server.engine_main import Loaded, serve_engine
from tilewright.server.logs import Log
from tilewright.server.prompts import Served
from tilewright.server.spelling import Spellings

__all__ = ["alone", "loaded", "prompts"]


def loaded(model: str, options: dict[str, Any]) -> Loaded:
    """The engine of a model, or of one of `SHAPES` with random weights, whose tokens are random words."""
    if model not in SHAPES:
        llm = LLM(model, **options)
        return llm.engine, Served.of(llm.engine, model), None
    engine = load_engine(SHAPES[model], EngineConfig(**options))
    tokenizer = words(engine.vocab_size)
    served = Served(
        name=model, tokenizer=tokenizer, vocab_size=engine.vocab_size, max_model_len=engine.scheduler.max_model_len,
        max_samples=engine.scheduler.max_waiting, has_chat=False, has_adapters=False, spellings=Spellings(tokenizer),
    )  # fmt: skip
    return engine, served, None


def prompts(count: int, tokens: int, vocab: int, seed: int) -> list[list[int]]:
    """`count` random prompts of `tokens` tokens, which share no page."""
    return np.random.default_rng(seed).integers(0, vocab, (count, tokens)).tolist()


def alone(engine: Engine, streams: int, tokens_in: int, tokens_out: int, seed: int) -> dict[str, float]:
    """{tok_per_s, decode_tok_per_s, p50, p99} of the engine alone.

    tok_per_s is over the whole run; the others are over the steps in which all streams decoded. p50 and p99 are milliseconds.
    """
    params = SamplingParams(max_tokens=tokens_out, temperature=0.0, ignore_eos=True)
    asked = prompts(streams, tokens_in, engine.vocab_size, seed)
    start_s = time.perf_counter()
    for number, prompt in enumerate(asked):
        engine.submit(prompt, params, f"alone-{seed}-{number}", streams=[number])
    stamps, counts = [start_s], [0]
    while engine.has_work:
        found = engine.advance()
        stamps.append(time.perf_counter())
        counts.append(len(found.tokens))
    full = np.array(counts) == streams
    gaps = np.diff(np.array(stamps))[full[1:] & full[:-1]]
    p50, p99 = quantiles_ms(gaps)
    decoding = streams / float(gaps.mean()) if len(gaps) else float("nan")
    whole = streams * tokens_out / (stamps[-1] - start_s)
    return {"tok_per_s": round(whole), "decode_tok_per_s": round(decoding), "p50": p50, "p99": p99}


def _load(spec: dict[str, Any], notes: Path, log: Log) -> Loaded:
    engine, served, _ = made = loaded(spec["model"], spec["options"])
    sizes = (spec["streams"], spec["tokens_in"], spec["tokens_out"])
    runs = [alone(engine, *sizes, seed) for seed in range(spec["runs"])]
    notes.write_text(json.dumps({"runs": runs, "vocab": served.vocab_size}))
    return made


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    os._exit(serve_engine(Path(sys.argv[3]), int(sys.argv[4]), lambda log: _load(given, Path(sys.argv[2]), log)))
