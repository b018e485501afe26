"""Pretrain a small model on Countdown tasks with three numbers, then improve it by rewards with several algorithms and seeds.

Run `python scripts/rl_countdown.py`. The runs are spread over the GPUs of the machine. Processes that share a GPU take turns:
with twelve on one H100, a step of 1,024 samples took 8 s.

Pretraining ends when the model solves the share `--until` of held-out tasks, or after `--pretrain-s` seconds. Its learning rate
then falls to zero over `--fall` times as many updates again. A share `--wrong` of the answers that it reads is wrong
(expressions of the task's numbers with another value), as in a corpus that nobody has checked. Imitation keeps that share of
errors; rewards can unlearn it. Each reward run begins with these weights. It ends when it has reached its aim on two sets of
held-out tasks, or after `--seconds`. `--runs grpo:1e-4:5,ppo:1e-4:5` names algorithm, learning rate and number of seeds.
Answers are sampled at temperature 1, one per task. Prints the rates, and one JSON object for each run at the end.
"""

import argparse
import json
import multiprocessing
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from tilewright.bench.provenance import environment as provenance
from tilewright.models import Model, save_model
from tilewright.nn import Packed
from tilewright.rl.characters import Characters
from tilewright.rl.config import RLConfig
from tilewright.rl.environments.base import Task
from tilewright.rl.environments.puzzles import Countdown
from tilewright.rl.loop import Trainer
from tilewright.rl.policies import small_model
from tilewright.rl.rollout import Sampler
from tilewright.train.batch import IGNORED, TrainBatch, pack
from tilewright.train.optim import AdamW
from tilewright.train.step import NextToken, running_sum, train_step, trainable

SOLVED, HELD_OUT, CHECKED = 1 << 41, 1 << 40, (1 << 40) + (1 << 30)
"""First seeds of the tasks that are pretrained on, measured on during a run, and measured on before and after it."""
LONGEST, CHUNK = 16, 700
TEXT, TASKS = Characters(), Countdown()


Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def unsolved(task: Task, rng: random.Random) -> str:
    """An expression of the task's numbers that has another value."""
    while True:
        a, b, c = map(str, rng.sample(task.data["numbers"], 3))
        first, second = rng.choices("+-*/", k=2)
        both = f"{a}{first}{b}"
        written = f"({both}){second}{c}" if first in "+-" and second in "*/" else f"{both}{second}{c}"
        if not TASKS.score(task, written):
            return written


def packed(wrong: float, chunk: int) -> Arrays:
    """Answered tasks: token ids, targets, positions, and where texts begin. The loss is on the answers."""
    found, rng = [], random.Random(chunk)
    for seed in range(SOLVED + chunk * CHUNK, SOLVED + (chunk + 1) * CHUNK):
        task = TASKS.task(seed)
        written = unsolved(task, rng) if rng.random() < wrong else TASKS.solution(task)
        prompt, answer = TEXT.prompt(task.prompt), [*TEXT.prompt(written), TEXT.end]
        ids = np.array([*prompt, *answer])
        targets = ids[1:].copy()
        targets[: len(prompt) - 1] = IGNORED
        found.append((ids[:-1], targets))
    batch = pack(found)
    where = batch.packed
    return batch.token_ids.numpy(), batch.targets.numpy(), where.positions.numpy(), where.cu_q.numpy()


def batch_of(arrays: Arrays, device: torch.device) -> TrainBatch:
    """On a device."""
    ids, targets, positions, firsts = (torch.from_numpy(x) for x in arrays)
    where = Packed(positions=positions, cu_q=firsts, max_q_len=int(positions.max()) + 1)
    return TrainBatch(token_ids=ids, targets=targets, packed=where, n_targets=int((targets != IGNORED).sum())).to(device)


class Chunks:
    """Answered tasks, a share of them wrongly, made by processes at most `ahead` chunks ahead."""

    def __init__(self, processes: int, wrong: float, ahead: int = 64) -> None:
        self._room, self._ended = threading.Semaphore(ahead), False
        self._pool = multiprocessing.get_context("fork").Pool(processes)
        self._made = self._pool.imap(partial(packed, wrong), self._numbers())

    def __next__(self) -> Arrays:
        self._room.release()
        return next(self._made)

    def close(self) -> None:
        """End the processes."""
        self._ended = True
        self._room.release()
        self._pool.terminate()

    def _numbers(self) -> Iterator[int]:
        number = 0
        while not self._ended:
            self._room.acquire()
            yield number
            number += 1


def rate(sampler: Sampler, first: int, count: int) -> float:
    """Share of tasks whose sampled answer is right."""
    tasks = [TASKS.task(first + i) for i in range(count)]
    made = sampler([TEXT.prompt(task.prompt) for task in tasks], answers=1, max_tokens=LONGEST, seed=0)
    return sum(TASKS.score(task, TEXT.decode(answer.tokens)) for task, [answer] in zip(tasks, made)) / count


def pretrained(options: argparse.Namespace, chunks: Chunks, began: float) -> tuple[Model, float]:
    """The model, and the share of tasks that it solves."""
    config = config_of(options, "grpo", 0.0, 0)
    model = small_model(replace(config, model="", layers=options.layers, hidden=options.hidden))
    optimizer = AdamW(trainable(model), max_norm=1.0)
    sampler = Sampler(model, max_len=64, seqs=256, end_ids=TEXT.end_ids, cache_bytes=config.cache_bytes)
    device, objective, step, falls, last = next(model.parameters()).device, NextToken(), 0, 0, None
    while last is None or step < last:
        left = 1.0 if last is None else (last - step) / (last - falls)
        lr = options.pretrain_lr * left * min(1.0, (step + 1) / 100)
        result = train_step(model, optimizer, [batch_of(next(chunks), device)], lr, objective, running_sum)
        step += 1
        if step % options.measure_every == 0:
            found, took = rate(sampler, HELD_OUT, 512), time.perf_counter() - began
            print(f"pretraining: update {step}, loss {float(result.loss):.3f}, rate {found:.3f}, {took:.0f} s", flush=True)
            if last is None and (found >= options.until or took > options.pretrain_s):
                falls, last = step, step + max(1, int(step * options.fall))
    return model, rate(sampler, CHECKED, 2048)


def config_of(options: argparse.Namespace, algorithm: str, lr: float, seed: int) -> RLConfig:
    """Of one run of rewards."""
    return RLConfig(
        environment="countdown:numbers=3", algorithm=algorithm, model=str(options.folder / "model"), device=options.device,
        dtype=options.dtype, max_tokens=LONGEST, prompts=options.prompts, answers=options.answers,
        minibatches=options.minibatches, learning_rate=lr,
        critic_learning_rate=options.critic_lr, critic_warmup=5, entropy_bonus=options.entropy_bonus, decay=0.0,
        updates=100_000, seed=seed, reward_workers=1, cache_bytes=options.cache_mib << 20,
    )  # fmt: skip


def improve(options: argparse.Namespace) -> None:
    """One run of rewards; a line of JSON for each measurement, the last with all of them."""
    (name, lr, seed), aim = options.run.split(":"), options.aim
    with Trainer(config_of(options, name, float(lr), int(seed))) as trainer:
        if options.warm:
            trainer.step()
            return
        sampler = trainer.gatherer.sampler
        assert isinstance(sampler, Sampler)
        began, rates, checked, steps = time.perf_counter(), [], 0.0, []
        before = rate(sampler, CHECKED, 2048)
        while time.time() < options.until_time and checked < aim:
            row = trainer.step()
            steps.append(row["seconds"])
            if trainer.update % options.look_every == 0:
                rates.append((trainer.update, rate(sampler, HELD_OUT, 512)))
                said = {name: round(row[name], 4) for name in ("exact", "entropy", "kl_after", "ratio_off", "equal_groups")}
                print(json.dumps({"update": trainer.update, "rate": rates[-1][1], **said}), flush=True)
                if rates[-1][1] >= aim:
                    checked = rate(sampler, CHECKED, 2048)
        after = checked if checked >= aim else rate(sampler, CHECKED, 2048)
        found = {
            "algorithm": name, "lr": float(lr), "seed": int(seed), "before": before, "after": after, "aim": aim,
            "reached": after >= aim, "updates": trainer.update, "seconds": time.perf_counter() - began,
            "step_s": float(np.median(steps or [0.0])), "rates": rates, "failures": dict(trainer.workers.failures),
        }  # fmt: skip
    print(json.dumps(found), flush=True)


def started(options: argparse.Namespace, run: str, *more: str) -> tuple[subprocess.Popen[str], Path]:
    """A process that runs `improve`, and the file that it writes to."""
    log = options.folder / f"{run.replace(':', '-')}.jsonl"
    with log.open("w") as file:
        return subprocess.Popen([sys.executable, *sys.argv, "--run", run, *more], stdout=file, text=True), log


def main() -> None:
    """Pretrain, then all runs at once."""
    options = read()
    if options.run:
        return improve(options)
    began, ends = time.perf_counter(), time.time() + options.seconds
    options.folder.mkdir(parents=True, exist_ok=True)
    chunks = Chunks(options.processes, options.wrong)  # before the GPU is opened: its processes are forked
    print(json.dumps({**provenance(), "options": {name: str(value) for name, value in vars(options).items()}}), flush=True)
    first = config_of(options, "grpo", 0.0, 0)
    save(small_model(replace(first, model="", layers=options.layers, hidden=options.hidden)), options)
    early = started(options, "ppo:0:0", "--warm")[0]  # compiles what the runs will need
    model, before = pretrained(options, chunks, began)
    chunks.close()
    early.wait()
    save(model, options)
    aim = min(0.9, before + 0.3)
    print(f"pretrained: {before:.3f} of 2,048 tasks, {time.perf_counter() - began:.0f} s; the aim is {aim:.3f}", flush=True)
    runs = [
        (name, lr, seed)
        for name, lr, count in (run.split(":") for run in options.runs.split(","))
        for seed in range(int(count))
    ]
    running = [started(options, f"{name}:{lr}:{seed}", "--aim", str(aim), "--until-time", str(ends)) for name, lr, seed in runs]
    for process, _ in running:
        process.wait()
    report([log.read_text().splitlines() for _, log in running], before, aim)
    print(f"in all {time.perf_counter() - began:.0f} s")


def report(logs: list[list[str]], before: float, aim: float) -> None:
    """Every run, then how many of each kind have reached the aim."""
    found = [json.loads(lines[-1]) for lines in logs if lines and "reached" in lines[-1]]
    print(f"{len(logs) - len(found)} runs ended without a result") if len(found) < len(logs) else None
    for one in found:
        print(json.dumps(one))
    for lines in logs:
        print("\n".join(lines[-3:-1]))
    for kind in sorted({(one["algorithm"], one["lr"]) for one in found}):
        own = [one for one in found if (one["algorithm"], one["lr"]) == kind]
        after = ", ".join(f"{one['after']:.3f}" for one in own)
        reached = f"{sum(one['reached'] for one in own)} of {len(own)} reached {aim:.3f} from {before:.3f}"
        print(f"{kind[0]} at {kind[1]:g}: {reached}: {after}")


def save(model: Model, options: argparse.Namespace) -> None:
    """A model folder that runs begin with."""
    save_model(model, options.folder / "model")
    TEXT.save(options.folder / "model")


def read() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (
        ("device", "cuda"), ("dtype", "float32"), ("layers", 4), ("hidden", 256), ("until", 0.9), ("fall", 0.25),
        ("wrong", 0.5), ("pretrain-s", 130.0), ("pretrain-lr", 2e-3), ("measure-every", 50), ("look-every", 10),
        ("seconds", 535.0), ("runs", "grpo:1e-4:5,ppo:1e-4:5"),
        ("prompts", 128), ("answers", 8), ("minibatches", 2), ("critic-lr", 2e-4), ("entropy-bonus", 0.0),
        ("cache-mib", 1024), ("processes", 12), ("until-time", 0.0), ("aim", 2.0), ("run", ""),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--folder", type=Path, default=Path("countdown"))
    parser.add_argument("--warm", action="store_true", help="run only one step of one run")
    return parser.parse_args()


if __name__ == "__main__":
    main()
