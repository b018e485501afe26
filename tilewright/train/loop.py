"""The main loop of a run: updates, checkpoints, log, measurements and samples. A run that was killed can be resumed.

The results depend only on the config and the data. A checkpoint contains everything that later updates depend on. So a run that
was killed at any time and resumed gives bitwise the same losses as a run without interruption, on one device with
`deterministic`.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tilewright.models import Model, empty_model, save_model
from tilewright.parallel.saved import gathered
from tilewright.parallel.spread import Spread
from tilewright.train.batch import Piece, TrainBatch, pack
from tilewright.train.checkpoint import Checkpoints, load
from tilewright.train.config import TrainConfig, differences, merged, read_toml, to_toml
from tilewright.train.data import Mixture, Texts
from tilewright.train.log import Log, Silent
from tilewright.train.optim import Muon, Optimizer
from tilewright.train.setup import Costs, learning_rate
from tilewright.train.sharded import ShardedCheckpoints
from tilewright.train.step import (
    NextToken,
    Objective,
    Passes,
    StepResult,
    loss_and_grads,
    running_sum,
    spread_step,
    train_step,
)

__all__ = ["Held", "Run", "Summary", "bits_per_byte", "resume", "save_whole"]

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Held:
    """Held-out texts: the loss on them is measured, but they are never trained on.

    bytes_per_token: UTF-8 bytes of the texts per token, on average.
    """

    texts: Texts
    tokens: int
    bytes_per_token: float


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The state at the end of a run."""

    step: int
    loss: float | None
    """Loss of the last update, in nats; None if no update was left to make."""
    bits_per_byte: float | None
    tokens: int


@dataclass(kw_only=True)
class Run:
    """A run and its progress.

    objective: the loss to minimise.
    pack: (pieces of rows, whether to pin memory) -> a batch in the form that the objective needs.
    held: the texts to measure; None: measure nothing.
    sample: writes a text with the current weights; None: write no samples.
    say: called with progress messages, one line each.
    spread: this rank's share of the work; None for a single process that sums in the default order.
    passes: computes losses and gradients if `spread` is None.
    """

    config: TrainConfig
    model: Model
    optimizer: Optimizer | Muon
    data: Mixture
    costs: Costs
    device: torch.device
    objective: Objective
    say: Say
    pack: Callable[[Sequence[Piece], bool], TrainBatch] = pack
    held: Held | None = None
    sample: Callable[[], str] | None = None
    spread: Spread | None = None
    passes: Passes = loss_and_grads
    step: int = 0
    tokens: int = 0
    _skipped: int = 0
    _measured: float | None = None
    _waiting: list[tuple[dict[str, Any], StepResult]] = field(default_factory=list)
    _since: float = 0.0
    _counted: int = 0

    def train(self) -> Summary:
        """Run until the last update.

        Raises:
            FloatingPointError: in `max_skipped` successive updates, the gradients were not finite.
            OSError: the last checkpoint could not be written.
        """
        config, folder = self.config, Path(self.config.out)
        checkpoints = self._checkpoints()
        log = Log(folder, self.step, config.tensorboard) if self.is_first else Silent()
        self._since, self._counted, last = time.perf_counter(), self.tokens, {"loss": None}
        try:
            while self.step < config.steps:
                lr = learning_rate(config, self.step)
                result = self._update([self._batch() for _ in range(config.micro_batches)], lr)
                self.step += 1
                self._waiting.append(({"step": self.step, "lr": lr, "tokens": self.tokens}, result))
                measures = self.held is not None and self._due(config.eval_every)
                samples = self.sample is not None and config.sample_every > 0 and self.step % config.sample_every == 0
                if measures or samples or self._due(config.log_every) or self._due(config.save_every):
                    last = self._write(log)
                if measures:
                    self._measure(log)
                if samples and self.sample is not None:
                    self.say(f"step {self.step} writes: {self.sample()!r}")
                if measures or samples:
                    self._since = time.perf_counter()  # tokens/s does not include the time for measuring and sampling
                if self._due(config.save_every):
                    self._save(checkpoints)
                self._warn(checkpoints.poll())
            self._warn(checkpoints.finish())
            if self.is_first and not checkpoints.has(self.step):
                raise OSError(f"the last checkpoint, of step {self.step}, could not be written: the warning above says why")
        finally:
            checkpoints.close()
            log.close()
        return Summary(step=self.step, loss=last["loss"], bits_per_byte=self._measured, tokens=self.tokens)

    def _due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.config.steps

    def _batch(self) -> TrainBatch:
        rows = [self.data.row(self.config.row_tokens) for _ in range(self.config.micro_rows)]
        pieces = [piece for row in rows for piece in row]
        if (highest := max(int(ids.max()) for ids, _ in pieces)) >= self.model.config.vocab_size:
            raise ValueError(
                f"the data contain token {highest}, but the model has only {self.model.config.vocab_size} tokens in "
                "its vocabulary; the shards were made with another tokenizer, so make them again with the model's"
            )
        return self.pack(pieces, self.device.type == "cuda")

    def _update(self, batches: list[TrainBatch], lr: float) -> StepResult:
        """Make one update from the micro-batches of all ranks. This rank computes only its own."""
        self.tokens += sum(batch.token_ids.numel() for batch in batches)
        if self.spread is None:
            there = [batch.to(self.device) for batch in batches]
            return train_step(self.model, self.optimizer, there, lr, self.objective, running_sum, self.passes)
        n_targets = sum(batch.n_targets for batch in batches)
        own = [batch.to(self.device) for i, batch in enumerate(batches) if self.spread.owns(i, len(batches))]
        return spread_step(self.spread, self.optimizer, own, n_targets, lr, self.objective)

    @property
    def is_first(self) -> bool:
        """Whether this rank writes files and messages."""
        return self.spread is None or self.spread.mesh.rank == 0

    def _write(self, log: Log | Silent) -> dict[str, Any]:
        """Read the results of the steps since the last call, and log them. Reading waits for the device."""
        last: dict[str, Any] = {}
        numbers = [(entry, result.loss.item(), result.norm.item(), result.applied.item()) for entry, result in self._waiting]
        self._waiting.clear()
        now = time.perf_counter()
        took, self._since = now - self._since, now
        if not numbers:
            return last
        speed = (self.tokens - self._counted) / took
        self._counted = self.tokens
        for entry, loss, norm, applied in numbers:
            last = {**entry, "loss": loss, "norm": norm, "applied": bool(applied)}
            self._skipped = 0 if applied else self._skipped + 1
            if entry is numbers[-1][0]:
                last |= {"tokens_per_s": speed, **self.costs.mfu(speed), **self.objective.measures()}
                if self.device.type == "cuda":
                    last["peak_memory_bytes"] = torch.cuda.max_memory_allocated(self.device)
            log(last)
            if self._skipped >= self.config.max_skipped:
                raise FloatingPointError(
                    f"gradients were not finite in {self._skipped} updates in a row up to step {last['step']}, and "
                    "none of them was applied; lower lr, lengthen warmup, or check the data; the last checkpoint is "
                    "from before these updates"
                )
        self.say(self._line(last, speed))
        return last

    def _line(self, last: dict[str, Any], speed: float) -> str:
        words = [f"step {last['step']}/{self.config.steps}", f"loss {last['loss']:.4f}", f"norm {last['norm']:.3f}"]
        words += [f"lr {last['lr']:.2e}"] + ([] if last["applied"] else ["skipped: gradients not finite"])
        words += [f"{speed:,.0f} tokens/s"]
        if "mfu_causal" in last:
            words += [f"MFU {last['mfu_causal']:.1%} causal, {last['mfu_full']:.1%} full"]
        left = int((self.config.steps - self.step) * self.config.step_tokens / speed)
        words += [f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d} left"]
        return ", ".join(words)

    def _measure(self, log: Log | Silent) -> None:
        if self.held is None:
            return
        self._measured = bits_per_byte(self.model, self.held, self.config, self.device)
        log({"step": self.step, "bits_per_byte": self._measured})
        self.say(f"step {self.step}: {self._measured:.4f} bits per byte")

    # ---- checkpoints

    def _tensors(self) -> dict[str, torch.Tensor]:
        found = {**self.optimizer.state_dict(), "random.cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            found["random.cuda"] = torch.cuda.get_rng_state(self.device)
        return found

    def _checkpoints(self) -> Checkpoints:
        folder, config = Path(self.config.out), self.config
        if self.spread is None or self.spread.mesh.world.size == 1:
            return Checkpoints(folder, config.keep, config.save_async)
        return ShardedCheckpoints(folder, config.keep, config.save_async, self.spread.mesh.world)

    def _save(self, checkpoints: Checkpoints) -> None:
        state = {"step": self.step, "tokens": self.tokens, "skipped": self._skipped, "data": self.data.state()}
        tensors = self._tensors()
        if isinstance(checkpoints, ShardedCheckpoints) and self.spread is not None:
            self._warn(checkpoints.save_shards(self.step, tensors, self.spread.pieces, state, to_toml(self.config)))
            return
        if self.spread is not None:
            tensors = gathered(tensors, self.spread.pieces, self.spread.mesh.world)
        self._warn(checkpoints.save(self.step, tensors, state, to_toml(self.config)))

    def _warn(self, failure: str | None) -> None:
        if failure is not None:
            self.say(f"warning: {failure}")


def resume(run: Run) -> bool:
    """Return to the last checkpoint in the folder of the run. Returns False if there is none.

    Raises:
        ValueError: the checkpoint is damaged, or belongs to a run with another config; nothing was changed.
    """
    found = Checkpoints(Path(run.config.out), run.config.keep, run.config.save_async).latest()
    if found is None:
        return False
    if changed := differences(merged(read_toml(found / "config.toml"), {}), run.config):
        raise ValueError(
            f"{found} belongs to a run with other settings: {'; '.join(changed)}. Give the same values, or set out to "
            "another folder"
        )
    tensors, state = load(found, run._tensors(), None if run.spread is None else run.spread.pieces)
    random = {name: tensors.pop(name) for name in list(tensors) if name.startswith("random.")}
    run.data.load_state(state["data"])
    run.optimizer.load_state_dict(tensors)
    torch.set_rng_state(random["random.cpu"])
    if "random.cuda" in random:
        torch.cuda.set_rng_state(random["random.cuda"], run.device)
    if run.spread is not None:
        run.spread.share()
    run.step, run.tokens, run._skipped = state["step"], state["tokens"], state["skipped"]
    return True


def save_whole(run: Run, folder: Path, tokenizer: Path | None) -> None:
    """Gather the model from all ranks, and save it as a Hugging Face folder."""
    spread = run.spread
    if spread is None:
        save_model(run.model, folder, tokenizer)
        return
    weights = gathered({f"weights.{n}": t for n, t in spread.held.items()}, spread.pieces, spread.mesh.world)
    if run.is_first:
        whole = empty_model(run.model.config, device="cpu", dtype=next(iter(weights.values())).dtype)
        for name, parameter in whole.named_parameters():
            parameter.data.copy_(weights[f"weights.{name}"])
        save_model(whole, folder, tokenizer)
    spread.mesh.world.first(lambda: None)


@torch.no_grad()
def bits_per_byte(model: Model, held: Held, config: TrainConfig, device: torch.device) -> float:
    """Bits per byte of held-out texts, in rows of the same length as in training. Each token counts once.

    (nats of the tokens / ln 2) / (tokens * bytes per token), over all texts if `eval_rows` is 0, otherwise over the first
    `eval_rows` rows.
    """
    length = config.row_tokens
    wanted = min(held.tokens, config.eval_rows * length) if config.eval_rows else held.tokens
    objective, nats, at, count = NextToken(), 0.0, 0, 0
    while at < wanted:
        pieces = []
        for _ in range(config.micro_rows):
            if at < wanted:
                row, at = held.texts.row(at, min(length, wanted - at))
                pieces += row
        batch = pack(pieces).to(device)
        if batch.n_targets:
            nats += objective(model, batch).item()
            count += batch.n_targets
    return nats / math.log(2) / (wanted * held.bytes_per_token)
