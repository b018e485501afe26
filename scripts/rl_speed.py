"""Measure tokens per second of a whole GRPO step with random weights on one GPU, here and with transformers.

Run `python scripts/rl_speed.py --of ours`, `--of invariant` (ours with batch-invariant kernels), `--of continuous-batching`
(transformers) or `--of generate` (transformers).

A step samples `--answers` answers of exactly `--tokens` tokens to each of `--prompts` prompts, scores them with random numbers,
and updates all weights once by AdamW. The transformers loop samples by its continuous batching (`generate_batch`) or by
`generate` on batches of equal prompts, computes the loss by autograd over `--micro` answers at a time, and uses AdamW on
bfloat16 weights. There, `--part N` samples only the Nth part of the prompts, and `--tokens` may be smaller. Rates refer to what
was sampled; `whole_s` is the time of a step of all prompts with answers of `--whole` tokens at these rates. It counts the start
and the prompts of a sample of few tokens several times, but not that longer contexts are slower. A warm-up step comes before
the measured ones: as many prompts as fill a pass, all prompts with `--graphs`, with transformers of few tokens. Prints one JSON
object per line; `idle` is the share of NVML samples without a running kernel, `sampling_idle` and `learning_idle` are those of
the two halves of a step.
"""

import argparse
import json
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tilewright.bench.provenance import environment as provenance
from tilewright.models import SHAPES, ModelConfig, random_model
from tilewright.rl.config import RLConfig
from tilewright.rl.loop import Trainer

REWARD = """
import random
from tilewright.rl.environments.base import Task


class Noise:
    def task(self, seed):
        return Task(prompt=str(seed))

    def score(self, task, answer):
        return random.Random(task.prompt + answer).random()
"""


class Ids:
    """Prompts of random tokens; no token ends an answer."""

    end_ids = ()

    def __init__(self, vocab: int, length: int) -> None:
        self.vocab, self._length = vocab, length

    def prompt(self, text: str) -> list[int]:
        """The tokens of a prompt."""
        return [random.Random(f"{text} {i}").randrange(self.vocab) for i in range(self._length)]

    reply = prompt

    def decode(self, ids: list[int]) -> str:
        """Something that depends on all tokens."""
        return str(hash(tuple(ids)))

    def save(self, folder: Path) -> None:
        """Nothing."""


class Idle:
    """Share of samples, ten a second, in which the GPU ran nothing; None where NVML does not say."""

    def __enter__(self) -> "Idle":
        self._stop, self._seen = threading.Event(), list[tuple[float, int]]()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def share(self) -> float | None:
        """So far."""
        return self.between(0.0, float("inf"))

    def between(self, begin: float, end: float) -> float | None:
        """Between two times of `time.perf_counter`."""
        seen = [busy for at, busy in self._seen if begin <= at <= end]
        return 1 - sum(seen) / (100 * len(seen)) if seen else None

    def _run(self) -> None:
        while torch.cuda.is_available() and not self._stop.wait(0.1):
            try:
                self._seen.append((time.perf_counter(), torch.cuda.utilization()))
            except (ModuleNotFoundError, RuntimeError):
                return


def shape_of(options: argparse.Namespace) -> ModelConfig:
    """Of Qwen3 1.7B, 0.6B, or a tiny one for a try on a CPU."""
    base = SHAPES["qwen3-0.6b"]
    if options.shape == "1.7b":
        base = replace(base, hidden_size=2048, intermediate_size=6144)
    if options.shape == "tiny":
        base = replace(
            base, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            head_dim=16, vocab_size=512, windows=(None,) * 2,
        )  # fmt: skip
    return replace(base, max_position_embeddings=4096)


def trainer_of(options: argparse.Namespace, folder: Path, *, invariant: bool) -> Trainer:
    """A trainer of random weights."""
    path = folder / "noise.py"
    path.write_text(REWARD, encoding="utf-8")
    config = RLConfig(
        environment=f"{path}:Noise", algorithm="grpo", device=options.device, dtype=options.dtype, prompts=options.prompts,
        answers=options.answers, max_tokens=options.tokens, minibatches=1, updates=1000, entropy_bonus=0.0, learning_rate=1e-5,
        tokens_per_pass=options.tokens_per_pass, reward_workers=options.workers, cache_bytes=options.cache_gib << 30,
        moved_every=0, invariant=invariant, free_cache=options.free_cache, graphs=options.graphs,
    )  # fmt: skip
    shape, dtype = shape_of(options), getattr(torch, options.dtype)
    model = random_model(shape, device=torch.device(options.device), dtype=dtype, seed=0).requires_grad_(True)
    return Trainer(config, model, Ids(shape.vocab_size, options.prompt_tokens))


def step_of(trainer: Trainer) -> dict[str, Any]:
    """One step's numbers that are shown."""
    with Idle() as idle:
        began = time.perf_counter()
        row = trainer.step()
        sampled = began + row["waiting"] * row["seconds"]
    names = (
        "seconds", "length", "sampled_tokens_per_s", "trained_tokens_per_s", "ratio_off", "lost", "cache_freed_bytes",
        "cache_free_s", "cache_take_s",
    )  # fmt: skip
    sampling = row["sampling"] * row["seconds"]
    answers = trainer.config.prompts * trainer.config.answers
    return {
        **{name: row[name] for name in names if name in row},
        "sampling_s": sampling, "learning_s": row["seconds"] * (1 - row["waiting"]),
        "tokens_per_s": answers * row["length"] / row["seconds"], "idle": idle.share, "peak_bytes": peak(),
        "sampling_idle": idle.between(began, sampled), "learning_idle": idle.between(sampled, float("inf")),
    }  # fmt: skip


def ours(options: argparse.Namespace, modes: tuple[bool, ...]) -> None:
    """Steps in each mode, in turns; then the price of the second, medians over those of the first less 1."""
    a_prompt = options.answers * (options.tokens + options.prompt_tokens)
    rows: dict[bool, list[dict[str, Any]]] = {invariant: [] for invariant in modes}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        trainers = {}
        for invariant in modes:
            began = time.perf_counter()
            trainers[invariant] = stack.enter_context(trainer_of(options, Path(folder), invariant=invariant))
            if not options.graphs:  # a graph is captured for the parts of a whole step
                trainers[invariant].gatherer.prompts = min(options.prompts, -(-options.tokens_per_pass // a_prompt))
            trainers[invariant].step()  # a pass in full, so that later ones compile nothing
            trainers[invariant].gatherer.prompts = options.prompts
            say(options, {"invariant": invariant, "ready_s": time.perf_counter() - began})
        for step in range(options.steps):
            for invariant, trainer in trainers.items():
                rows[invariant].append(step_of(trainer))
                say(options, {"of": options.of, "step": step, "invariant": invariant, **rows[invariant][-1]})
    if len(modes) > 1 and options.steps:
        names = {"whole": "seconds", "sampling": "sampling_s", "learning": "learning_s"}
        medians = {
            mode: {name: statistics.median(row[name] for row in rows[mode]) for name in names.values()} for mode in modes
        }
        price = {part: medians[True][name] / medians[False][name] - 1 for part, name in names.items()}
        say(options, {"of": "price", "steps": options.steps, **price})


def peak() -> int:
    """Bytes."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def say(options: argparse.Namespace, row: dict[str, Any]) -> None:
    """A line of JSON."""
    print(json.dumps({"shape": options.shape, **row}), flush=True)


def peer_model(options: argparse.Namespace) -> Any:
    """The same shape by transformers."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    shape = shape_of(options)
    config = Qwen3Config(
        vocab_size=shape.vocab_size, hidden_size=shape.hidden_size, intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_hidden_layers, num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads, head_dim=shape.head_dim, tie_word_embeddings=True,
        max_position_embeddings=shape.max_position_embeddings,
    )  # fmt: skip
    with torch.device(options.device):
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options.dtype), attn_implementation="sdpa")


def by_continuous_batching(options: argparse.Namespace, model: Any) -> Callable[[list[list[int]], int], list[list[int]]]:
    """Answers by `generate_batch`."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    def sample(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        drawing = GenerationConfig(do_sample=True, max_new_tokens=tokens, eos_token_id=-1, top_k=0)
        batching = ContinuousBatchingConfig(max_memory_percent=0.5, max_requests_per_batch=options.at_once)
        if options.device == "cpu":
            batching.num_blocks, batching.max_batch_tokens = 64, 256
        given = [prompt for prompt in prompts for _ in range(options.answers)]
        found = model.generate_batch(inputs=given, generation_config=drawing, continuous_batching_config=batching)
        answers = [one.generated_tokens for one in found.values()]
        if [len(answer) for answer in answers] != [tokens] * len(given):
            raise RuntimeError(f"{len(answers)} answers of {len(given)} came, or some are shorter than {tokens} tokens")
        return [[*prompt, *answer] for prompt, answer in zip(given, answers)]

    return sample


def by_generate(options: argparse.Namespace, model: Any) -> Callable[[list[list[int]], int], list[list[int]]]:
    """Answers by `generate`, `at_once` at a time, all of one length."""

    def sample(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        given = torch.tensor([prompt for prompt in prompts for _ in range(options.answers)], device=options.device)
        found = []
        for some in given.split(options.at_once):
            made = model.generate(some, attention_mask=torch.ones_like(some), do_sample=True, top_k=0, max_new_tokens=tokens,
                                  min_new_tokens=tokens, pad_token_id=0)  # fmt: skip
            found += made.tolist()
        return found

    return sample


def learn(options: argparse.Namespace, model: Any, optimizer: torch.optim.Optimizer, whole: list[list[int]]) -> None:
    """One update by GRPO: with one update a step the ratio is 1 and its gradient that of the log-probability."""
    rewards = torch.rand(len(whole) // options.answers, options.answers, device=options.device)
    advantages = ((rewards - rewards.mean(1, True)) / (rewards.std(1, keepdim=True) + 1e-6)).flatten()
    tokens, start = torch.tensor(whole, device=options.device), options.prompt_tokens
    for some, advantage in zip(tokens.split(options.micro), advantages.split(options.micro)):
        logits = model(input_ids=some, use_cache=False).logits[:, start - 1 : -1]
        chosen = some[:, start:]
        logprobs = -torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), chosen.flatten(), reduction="none")
        logprobs = logprobs.view(chosen.shape)
        ratio = (logprobs - logprobs.detach()).exp()
        loss = -torch.minimum(ratio * advantage[:, None], ratio.clamp(0.8, 1.2) * advantage[:, None]).mean(1).sum()
        (loss / len(whole)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def peer(options: argparse.Namespace) -> None:
    """Steps of the loop that is built of transformers."""
    model, text = peer_model(options), Ids(shape_of(options).vocab_size, options.prompt_tokens)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0, fused=options.device != "cpu")
    sample = (by_continuous_batching if options.of == "continuous-batching" else by_generate)(options, model)
    count = max(1, options.prompts // options.part)
    for step in range(-1, options.steps):
        tokens = options.tokens if step >= 0 else 16
        prompts = [text.prompt(f"{step} {i}") for i in range(count)]
        began = now()
        with Idle() as idle:
            model.eval()
            whole = sample(prompts, tokens)
            sampled = now()
            if options.device != "cpu":
                torch.cuda.empty_cache()
            model.train()
            learn(options, model, optimizer, whole)
            ended = now()
        row = {
            "of": options.of, "step": step, "prompts": count, "seconds": ended - began, "sampling_s": sampled - began,
            "learning_s": ended - sampled, "tokens_per_s": len(whole) * tokens / (ended - began),
            "sampled_tokens_per_s": len(whole) * tokens / (sampled - began),
            "trained_tokens_per_s": len(whole) * (tokens + options.prompt_tokens) / (ended - sampled), "idle": idle.share,
            "peak_bytes": peak(), "attention": model.config._attn_implementation,
        }  # fmt: skip
        answers = options.prompts * options.answers
        row["whole_s"] = (
            answers * options.whole / row["sampled_tokens_per_s"]
            + answers * (options.whole + options.prompt_tokens) / row["trained_tokens_per_s"]
        )
        row["whole_tokens_per_s"] = answers * options.whole / row["whole_s"]
        say(options, row)


def now() -> float:
    """Seconds, when the GPU has done all that it was told."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    """One of the loops."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--of", choices=("ours", "invariant", "continuous-batching", "generate"), default="ours")
    parser.add_argument("--shape", choices=("1.7b", "0.6b", "tiny"), default="1.7b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--free-cache", action="store_true", help="ours: free the KV cache's memory while the trainer works")
    parser.add_argument("--graphs", action="store_true", help="ours: replay the policy's passes as a CUDA graph")
    for name, default in (
        ("prompts", 64), ("answers", 8), ("tokens", 1024), ("prompt-tokens", 64), ("steps", 1), ("tokens-per-pass", 16384),
        ("cache-gib", 22), ("workers", 4), ("micro", 4), ("at-once", 128), ("part", 1), ("whole", 1024),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    print(json.dumps({**provenance(), "options": vars(options)}), flush=True)
    if options.of == "ours":
        ours(options, (False,))
    elif options.of == "invariant":
        ours(options, (False, True))
    else:
        peer(options)


if __name__ == "__main__":
    main()
