"""Measures the cost of HTTP: the same requests to an engine alone, and to the same engine in a server of several processes.

Both measurements use one process with one set of weights and pages. Alone, the engine gets all requests at once; the server
gets them from clients in separate processes, as fast as these can send them, and every event is read.
"""

import json
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tilewright.bench.front_server import Found, clients, finite, quantiles_ms, server
from tilewright.bench.served_engine import prompts

__all__ = ["run_served"]

START_S = 600.0


def run_served(
    model: str, options: dict[str, Any], *, fronts: int, streams: int, tokens_in: int, tokens_out: int, runs: int = 2
) -> Iterator[dict[str, Any]]:
    """Yield one row for each run when it ends; in the first one neither side is warmed up.

    Args:
        model: one of `SHAPES`, with random weights, or any model that `serve` accepts.
        options: options of `EngineConfig`.

    Raises:
        OSError: the server does not start, or a stream ends early.
    """
    sizes = {"streams": streams, "tokens_in": tokens_in, "tokens_out": tokens_out}
    spec = {"model": model, "options": {"max_seqs": streams, **options}, **sizes, "runs": runs}
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder, "alone.json")
        engine = ["-m", "tilewright.bench.served_engine", json.dumps(spec), str(notes)]
        with server(fronts, engine, START_S) as processes:
            known = json.loads(notes.read_text())
            for run, alone in enumerate(known["runs"]):
                asked = [_body(prompt, tokens_out) for prompt in prompts(streams, tokens_in, known["vocab"], runs + run)]
                before = processes.cpu_s()
                found = clients(processes, [share for i in range(fronts) if (share := asked[i::fronts])])
                spent = {pid: seconds - before[pid] for pid, seconds in processes.cpu_s().items()}
                made = streams * tokens_out
                yield finite({
                    "model": model, "fronts": fronts, **sizes, "run": run, **_compared(found, alone, streams, tokens_out),
                    "front_us_a_token": round(1e6 * sum(spent[pid] for pid in processes.fronts) / made, 2),
                    "engine_cpu_s": round(spent[processes.engine], 2),
                    "seconds": round(found.seconds, 3),
                    "cores": os.cpu_count(),
                })  # fmt: skip


def _body(prompt: list[int], tokens: int) -> bytes:
    return json.dumps({"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True}).encode()


def _compared(found: Found, alone: dict[str, float], streams: int, tokens: int) -> dict[str, Any]:
    p50, p99 = quantiles_ms(found.gaps_s)
    events = found.total("events")
    # Tokens per event: if there is more than one, a gap is that of several tokens.
    mean_s = float(found.gaps_s.mean()) if len(found.gaps_s) else math.nan
    decoding = streams * (streams * tokens / events) / mean_s
    whole = streams * tokens / found.seconds
    return {
        "alone_tok_per_s": alone["tok_per_s"],
        "tok_per_s": round(whole),
        "share": round(whole / alone["tok_per_s"], 4),
        "alone_decode_tok_per_s": alone["decode_tok_per_s"],
        "decode_tok_per_s": round(decoding, 1),
        "decode_share": round(decoding / alone["decode_tok_per_s"], 4),
        "adds_ms_p50": round(p50 - alone["p50"], 3),
        "adds_ms_p99": round(p99 - alone["p99"], 3),
        "alone_gap_ms_p50": alone["p50"],
        "alone_gap_ms_p99": alone["p99"],
        "gap_ms_p50": p50,
        "gap_ms_p99": p99,
        "tokens_an_event": round(streams * tokens / events, 3),
    }
