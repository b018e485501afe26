"""Compare training speed and peak memory with other trainers of the same model, on one GPU.

    python scripts/train_peers.py qwen3-0.6b --rows 4 --out FILE
    python scripts/train_peers.py llama-1b --rows 2 --sides ours plain

    ours           this library's update, as in `scripts/train_speed.py`
    trainer        transformers' Trainer, bf16 by autocast, torch_compile, adamw_torch_fused
    trainer-liger  the same with Liger kernels
    plain          transformers' model by torch.compile, bf16 by autocast, fused AdamW, clip_grad_norm_
    plain-bf16     the same with weights and moments in bf16: less memory and work, but different numbers from all the others

With `--lora RANK` all sides train LoRA adapters for every linear layer of the blocks, beside frozen weights in bf16:

    python scripts/train_peers.py llama-8b --rows 1 --lora 16 --out FILE

    ours           this library's update
    ours-int4      the same beside weights of 4 bits (QLoRA)
    peft           transformers' model with `peft`, by torch.compile, fused AdamW
    peft-liger     the same with Liger kernels instead of torch.compile, and gradient checkpointing off

Make only one GPU visible (CUDA_VISIBLE_DEVICES), because Trainer uses all it sees. Each side runs in its own process, one after
the other; ours runs again at the end, which shows whether the GPU has slowed down. All sides have random weights, rows of one
document of random tokens, AdamW with clipping to norm 1, no recomputation, master weights in float32 (except plain-bf16), and
attention by torch's SDPA (except ours). The first updates, which compile, are not timed; peak memory is that of the timed ones.
A side that runs out of memory is tried again with half of the rows, and its entry says so.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tilewright.bench.provenance import environment
from tilewright.models import SHAPES, ModelConfig, empty_model, initialise, load_config, random_model, resolve
from tilewright.models.saving import hf_config
from tilewright.quant import quantize
from tilewright.train.batch import pack
from tilewright.train.config import TrainConfig
from tilewright.train.lora import adapted
from tilewright.train.setup import build_optimizer, learning_rate
from tilewright.train.step import NextToken, running_sum, train_step

SIDES = ("ours", "plain", "trainer-liger", "trainer", "plain-bf16")
LORA_SIDES = ("ours", "peft", "peft-liger", "ours-int4")
LR, BETAS, DECAY = 1e-4, (0.9, 0.95), 0.1


class Clock:
    """Tokens a second and peak memory of the updates behind the first `untimed`: call it in front of each, and at the end."""

    def __init__(self, device: torch.device, untimed: int, tokens: int):
        self._device, self._untimed, self._tokens, self._at = device, untimed, tokens, 0
        self._start = self._end = 0.0

    def __call__(self) -> None:
        if self._at == self._untimed:
            if self._device.type == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            self._start = time.perf_counter()
        self._at += 1

    def stop(self) -> None:
        """Behind the last update."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        self._end = time.perf_counter()

    def result(self) -> dict[str, float]:
        """Once it has stopped; it is stopped where it has not."""
        if not self._end:
            self.stop()
        took, updates = self._end - self._start, self._at - self._untimed
        found: dict[str, float] = {"tokens_per_s": updates * self._tokens / took, "updates": updates}
        return found | ({"peak_bytes": torch.cuda.max_memory_allocated()} if self._device.type == "cuda" else {})


def rows_of(vocabulary: int, rows: int, length: int) -> Iterator[np.ndarray]:
    """Token ids [rows, length + 1], for ever; the same for every side."""
    draw = np.random.default_rng(0)
    while True:
        yield draw.integers(1, vocabulary, (rows, length + 1))


def shape_of(name: str) -> ModelConfig:
    """A shape of the library, or that of a model."""
    return SHAPES[name] if name in SHAPES else load_config(resolve(name))


def ours(asked: argparse.Namespace, device: torch.device) -> dict[str, float]:
    """This library."""
    shape = shape_of(asked.shape).limited(asked.length)
    config = TrainConfig(
        model=asked.shape, init="load" if asked.lora else "random", row_tokens=asked.length, micro_rows=asked.rows,
        steps=asked.untimed + asked.updates,
        schedule="constant", warmup=0, lr=LR, beta1=BETAS[0], beta2=BETAS[1], weight_decay=DECAY, lora_rank=asked.lora,
        lora_base="int4" if asked.side == "ours-int4" else "float",
    )  # fmt: skip
    if asked.lora:
        model = random_model(shape, device=device, dtype=torch.bfloat16)
        if config.lora_base == "int4":
            quantize(model, "int4")
        model = adapted(config, model)
    else:
        model = empty_model(shape, device=device, dtype=torch.bfloat16).requires_grad_(True)
        initialise(model, std=0.02)
    optimizer, objective = build_optimizer(config, model), NextToken(deterministic=config.deterministic)
    clock, loss = Clock(device, asked.untimed, asked.rows * asked.length), torch.zeros(())
    for update, ids in zip(range(config.steps), rows_of(shape.vocab_size, asked.rows, asked.length)):
        clock()
        batch = pack([(row[:-1], row[1:]) for row in ids], device.type == "cuda").to(device)
        loss = train_step(model, optimizer, [batch], learning_rate(config, update), objective, running_sum).loss
    return {**clock.result(), "last_loss": loss.item()}


def theirs(asked: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> Any:
    """The model of transformers, with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    raw: dict[str, Any] = hf_config(shape_of(asked.shape).limited(asked.length)) | {"use_cache": False}
    config = AutoConfig.for_model(raw.pop("model_type"), **raw)
    with device:
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return model.to(dtype).train()


def plain(asked: argparse.Namespace, device: torch.device, dtype: torch.dtype = torch.float32) -> dict[str, float]:
    """A loop of one's own over torch.compile."""
    model = theirs(asked, device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=DECAY, fused=True)
    compiled = torch.compile(model)
    clock, loss = Clock(device, asked.untimed, asked.rows * asked.length), torch.zeros(())
    for _, ids in zip(range(asked.untimed + asked.updates), rows_of(model.config.vocab_size, asked.rows, asked.length)):
        clock()
        there = torch.from_numpy(ids[:, :-1]).to(device)
        with torch.autocast(device.type, torch.bfloat16) if dtype == torch.float32 else contextlib.nullcontext():
            loss = compiled(input_ids=there, labels=there).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return {**clock.result(), "last_loss": loss.item()}


def plain_bf16(asked: argparse.Namespace, device: torch.device) -> dict[str, float]:
    """`plain` without master weights."""
    return plain(asked, device, torch.bfloat16)


LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def peft(asked: argparse.Namespace, device: torch.device, liger: bool = False) -> dict[str, float]:
    """Adapters by `peft`, on transformers' model: compiled, or with Liger kernels."""
    from peft import LoraConfig, get_peft_model

    model = theirs(asked, device, torch.bfloat16)
    if liger:
        from liger_kernel.transformers import (  # pyright: ignore[reportMissingImports]
            _apply_liger_kernel_to_instance,
        )

        _apply_liger_kernel_to_instance(model=model)
    settings = LoraConfig(r=asked.lora, lora_alpha=2 * asked.lora, target_modules=LAYERS, task_type="CAUSAL_LM")
    model = get_peft_model(model, settings)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, betas=BETAS, weight_decay=DECAY, fused=True)
    called = model if liger else torch.compile(model)
    clock, loss = Clock(device, asked.untimed, asked.rows * asked.length), torch.zeros(())
    for _, ids in zip(range(asked.untimed + asked.updates), rows_of(model.config.vocab_size, asked.rows, asked.length)):
        clock()
        there = torch.from_numpy(ids[:, :-1]).to(device)
        loss = called(input_ids=there, labels=there).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return {**clock.result(), "last_loss": loss.item()}


def peft_liger(asked: argparse.Namespace, device: torch.device) -> dict[str, float]:
    """`peft` with Liger kernels."""
    return peft(asked, device, liger=True)


def trainer(asked: argparse.Namespace, device: torch.device, liger: bool = False) -> dict[str, float]:
    """transformers' Trainer."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    clock = Clock(device, asked.untimed, asked.rows * asked.length)

    class Timed(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            clock()

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step == steps:
                clock.stop()

    model, steps = theirs(asked, device, torch.float32), asked.untimed + asked.updates
    rows = rows_of(model.config.vocab_size, asked.rows * steps, asked.length)
    data = [{"input_ids": row[:-1], "labels": row[:-1]} for row in torch.from_numpy(next(rows))]
    with tempfile.TemporaryDirectory() as folder:
        made = TrainingArguments(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=asked.rows, bf16=True, torch_compile=True,
            optim="adamw_torch_fused", learning_rate=LR, adam_beta1=BETAS[0], adam_beta2=BETAS[1], weight_decay=DECAY,
            max_grad_norm=1.0, lr_scheduler_type="constant", logging_strategy="no", save_strategy="no", report_to="none",
            disable_tqdm=True, use_liger_kernel=liger, use_cpu=device.type == "cpu",
        )  # fmt: skip
        found = Trainer(model=model, args=made, train_dataset=data, callbacks=[Timed()]).train()  # pyright: ignore
    return {**clock.result(), "mean_loss": found.training_loss}


def trainer_liger(asked: argparse.Namespace, device: torch.device) -> dict[str, float]:
    """`trainer` with Liger kernels."""
    return trainer(asked, device, liger=True)


WAYS: dict[str, Callable[[argparse.Namespace, torch.device], dict[str, float]]] = {
    "ours": ours, "plain": plain, "plain-bf16": plain_bf16, "trainer": trainer, "trainer-liger": trainer_liger,
    "ours-int4": ours, "peft": peft, "peft-liger": peft_liger,
}  # fmt: skip


def side(asked: argparse.Namespace) -> dict[str, Any]:
    """One side in this process; with half of the rows where memory is short."""
    device = torch.device(asked.device)
    try:
        found = WAYS[asked.side](asked, device)
    except torch.cuda.OutOfMemoryError:
        return {"side": asked.side, "rows": asked.rows, "error": "out of memory"}
    return {"side": asked.side, "rows": asked.rows, **found}


def in_a_process(name: str, rows: int, words: list[str], limit_s: float) -> dict[str, Any]:
    """What a side says, or how it failed."""
    command = [sys.executable, __file__, *words, "--rows", str(rows), "--side", name]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return {"side": name, "rows": rows, "error": f"not ready after {limit_s:.0f} s"}
    lines = [line for line in ran.stdout.splitlines() if line.startswith('{"side"')]
    if ran.returncode or not lines:
        return {
            "side": name,
            "rows": rows,
            "error": "\n".join(ran.stderr.strip().splitlines()[-3:]) or f"exit {ran.returncode}",
        }
    found = json.loads(lines[-1])
    return in_a_process(name, rows // 2, words, limit_s) if found.get("error") == "out of memory" and rows > 1 else found


def installed(name: str) -> str | None:
    """The version of a package."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def main() -> None:
    """Run the sides, print a line for each, and write all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", help="model shape such as qwen3-0.6b or llama-1b, or a model folder or name")
    parser.add_argument("--rows", type=int, default=2, help="rows in each update")
    parser.add_argument("--length", type=int, default=4096, help="length of a row in tokens")
    parser.add_argument("--updates", type=int, default=8, help="number of timed updates")
    parser.add_argument("--untimed", type=int, default=3, help="updates before the timed ones")
    every = (*SIDES, *(name for name in LORA_SIDES if name not in SIDES))
    parser.add_argument("--sides", nargs="*", choices=every, help="default: all of the list above that applies")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train adapters of this rank")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--limit", type=float, default=600, help="most seconds for each side")
    parser.add_argument("--side", choices=every, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="JSON file for the results, written after each side")
    asked = parser.parse_args()
    known = LORA_SIDES if asked.lora else SIDES
    asked.sides = asked.sides or list(known)
    if wrong := [name for name in asked.sides if name not in known]:
        parser.error(f"{wrong[0]} is a side of runs {'without' if asked.lora else 'with'} --lora")
    if asked.side is not None:
        print(json.dumps(side(asked)))
        return
    words = [asked.shape, "--device", asked.device]
    words += [word for name in ("length", "updates", "untimed", "lora") for word in (f"--{name}", str(getattr(asked, name)))]
    packages = {name: installed(name) for name in ("transformers", "accelerate", "liger-kernel", "peft")}
    said = {
        "what": "python scripts/train_peers.py",
        **environment(card=asked.device != "cpu"),
        "peers": packages,
        "model": asked.shape,
    }
    said |= {"row_tokens": asked.length, "lora_rank": asked.lora, "rows": []}
    for name in [*asked.sides, *(["ours"] if "ours" in asked.sides and len(asked.sides) > 1 else [])]:
        said["rows"].append(in_a_process(name, asked.rows, words, asked.limit))
        print(json.dumps(said["rows"][-1]), flush=True)
        if asked.out is not None:
            asked.out.write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    main()
