"""Preference learning from pairs of a chosen and a rejected answer, without a reward model.

    r = [log p(chosen) - log p(rejected)] - [the same difference for the reference]
    dpo   -(1 - s) log sigmoid(beta r) - s log sigmoid(-beta r)       (Rafailov et al., "DPO", 2023; s: Mitchell, "cDPO", 2023)
    ipo   (r - 1 / (2 beta))^2                                        (Azar et al., "IPO", 2023)

Log-probabilities are those of the whole answer, without the prompt. The reference is the original model. When an adapter is
trained, this is the model without the adapter; otherwise it is a second, frozen model. A pair is two successive documents of a
batch. So the loss of a batch is a sum over pairs, whichever way the pairs are divided into micro-batches.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright import ops
from tilewright.models import Model
from tilewright.nn import PackedKeysValues, without_adapters
from tilewright.parallel.ranks import ALONE, Ranks
from tilewright.train.batch import IGNORED, Piece, TrainBatch, pack
from tilewright.train.step import plain_head

__all__ = ["Preference", "answer_logprobs", "pack_pairs", "preference_losses"]


def pack_pairs(pieces: Sequence[Piece], pin: bool = False) -> TrainBatch:
    """`pack` for pieces in which chosen and rejected answers alternate. `n_targets` is the number of pairs, by which losses are
    divided."""
    return replace(pack(pieces, pin), n_targets=len(pieces) // 2)


def answer_logprobs(model: Model, batch: TrainBatch, keys_values: PackedKeysValues) -> Tensor:
    """[documents] float64: for each document, the sum of the log-probabilities of its targets. Differentiable.

    Raises:
        TypeError: as `plain_head`.
    """
    hidden_TE, head = model(batch.token_ids, batch.packed, keys_values), plain_head(model)
    losses = ops.linear_cross_entropy(hidden_TE, head, batch.targets, model.head.bias, ignore_index=IGNORED, reduction="none")
    lengths = batch.packed.cu_q.diff().to(torch.int64)
    return -torch.segment_reduce(losses.double(), "sum", lengths=lengths, unsafe=True)


def preference_losses(kind: str, r: Tensor, *, beta: float, smoothing: float) -> Tensor:
    """The loss of each pair, from r [pairs]. kind: "dpo" or "ipo"; `smoothing` is not used with "ipo"."""
    if kind == "ipo":
        return (r - 1 / (2 * beta)) ** 2
    return -(1 - smoothing) * F.logsigmoid(beta * r) - smoothing * F.logsigmoid(-beta * r)


class Preference:
    """An objective (train/step.py): the sum of the losses of a batch's pairs.

    Args:
        kind: "dpo" or "ipo".
        beta, smoothing: beta and s in the formulas at the top of this file.
        reference: the original model; None: use the trained model without its adapters.
        deterministic: the same batch always gives the same gradients.
        replicas: the ranks that compute other pairs of the same updates.
    """

    def __init__(
        self, kind: str, *, beta: float, smoothing: float = 0.0, reference: Model | None = None, deterministic: bool = False,
        replicas: Ranks = ALONE,
    ):  # fmt: skip
        self.kind, self.beta, self.smoothing, self.reference = kind, beta, smoothing, reference
        self.keys_values = PackedKeysValues(deterministic=deterministic)
        self._seen: list[Tensor] = []
        self._replicas = replicas

    def __call__(self, model: Model, batch: TrainBatch) -> Tensor:
        """The sum of the losses of the batch's pairs, float32."""
        with torch.no_grad():
            if self.reference is not None:
                before = answer_logprobs(self.reference, batch, self.keys_values)
            else:
                with without_adapters(model):
                    before = answer_logprobs(model, batch, self.keys_values)
        gained = answer_logprobs(model, batch, self.keys_values) - before
        r = gained[0::2] - gained[1::2]
        if torch.is_grad_enabled():
            self._seen.append(r.detach())
        return preference_losses(self.kind, r, beta=self.beta, smoothing=self.smoothing).sum().float()

    def measures(self) -> dict[str, float]:
        """Results for all pairs since the last call, computed before their updates. margin: mean of beta r, which is the reward
        of the chosen minus that of the rejected answer. preferred: share of pairs with r > 0. Waits for the device."""
        if not self._seen:
            return {}
        r = torch.cat(self._seen).double()
        self._seen.clear()
        sums = torch.stack((r.sum(), (r > 0).double().sum(), r.new_tensor(r.numel(), dtype=torch.float64)))
        margin, preferred, pairs = self._replicas.all_gather(sums).view(-1, 3).sum(0).tolist()
        return {"margin": self.beta * margin / pairs, "preferred": preferred / pairs}
