"""Runs on many ranks: checks the plan against the model, connects the ranks, and creates the part of each rank."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch.distributed.rendezvous import rendezvous

from tilewright.hw.device import memory_bytes
from tilewright.hw.env import Launched, launched
from tilewright.models import Model, ModelConfig, weight_bytes_of
from tilewright.parallel.clock import bubble
from tilewright.parallel.mesh import Mesh, join, leave
from tilewright.parallel.part import make_part, refusal
from tilewright.parallel.pipeline import Pipeline
from tilewright.parallel.plan import Plan, Shape
from tilewright.parallel.predict import predicted, sizes_of
from tilewright.parallel.spread import Spread
from tilewright.parallel.watch import Watch
from tilewright.train.config import TrainConfig
from tilewright.train.setup import STATE_BYTES, dtype_of, feed_forward_numbers, plan_memory

__all__ = ["check_plan", "joined", "make_spread", "on_this_rank", "plan_lines", "quiet"]

_WHOLE = {"muon": "muon", "adamw-8bit": "adamw-8bit"}
_LOST_S = 25.0


def check_plan(config: TrainConfig, model: ModelConfig) -> None:
    """Raise ValueError if the plan does not fit the model or the run."""
    plan = config.parallel
    if config.lora_rank:
        _check_adapter(config)
    plan.check(
        Shape(
            layers=model.num_hidden_layers, heads=model.num_attention_heads, kv_heads=model.num_key_value_heads,
            inner=model.intermediate_size, tokens=config.row_tokens * config.micro_rows, micro_batches=config.micro_batches,
            tree=config.accumulate == "tree", whole=_WHOLE.get(config.optimizer),
            ragged=config.chat or config.loss != "next-token",
            experts=0 if model.experts is None else model.experts.routing.experts,
        )
    )  # fmt: skip
    cut = plan.alone() != Plan() or plan.pp > 1
    if config.sample_every and (cut or plan.zero == 3):
        raise ValueError("parallel: sample_every needs the whole model, but this plan divides it; set sample_every to 0")
    if config.eval_data is not None and (plan.pp > 1 or plan.sp or plan.chunks > 1):
        raise ValueError("parallel: eval_data cannot be measured if pp, sp or cp divides layers or tokens; leave eval_data out")


def _check_adapter(config: TrainConfig) -> None:
    plan = config.parallel
    if plan.alone() != Plan() or plan.pp > 1 or plan.ep > 1 or plan.zero > 2:
        raise ValueError(
            "parallel: an adapter can be trained only on replicas of the frozen model; use only dp, and zero 1 or 2"
        )
    if config.lora_dropout and plan.ranks > 1:
        raise ValueError("parallel: lora_dropout would draw different masks on each rank; set it to 0")


def on_this_rank(config: TrainConfig, device: torch.device) -> torch.device:
    """The device of this process. If the machine has several GPUs, it is the one with the process's local rank as its index."""
    place = launched() if config.parallel.ranks > 1 else None
    if place is None or device.type != "cuda" or (config.device or "").startswith("cuda:"):
        return device
    if place.local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"parallel: rank {place.rank} (local rank {place.local_rank}) has no GPU, because this machine has only "
            f"{torch.cuda.device_count()}; start fewer ranks here"
        )
    return torch.device("cuda", place.local_rank)


@contextmanager
def joined(config: TrainConfig, device: torch.device) -> Iterator[Mesh]:
    """Connect the ranks; yields their mesh. If a rank fails inside this context, the others end with a message that names it.

    Raises:
        ConnectionError: another rank is gone.
        ValueError: the number of ranks that were started differs from the plan's.
    """
    plan = config.parallel
    if plan.ranks == 1:
        yield Mesh()
        return
    place = launched()
    if place is None:
        raise ValueError(
            f"parallel needs {plan.ranks} ranks, but this is a single process; start them with `tilewright train` on "
            "one machine, or with torchrun on several"
        )
    if place.world != plan.ranks:
        raise ValueError(f"parallel needs {plan.ranks} ranks ({plan}), but {place.world} were started")
    store, _, _ = next(iter(rendezvous("env://")))
    watch = Watch(place.address, place.port, place.rank, place.world)
    try:
        yield join(plan, rank=place.rank, device=device, store=store, invariant=config.accumulate == "tree")
    except (ConnectionError, RuntimeError) as error:
        raise _explained(error, watch, place) from error
    except BaseException as error:
        watch.failed(str(error) or type(error).__name__)
        raise
    leave()
    watch.stop()


def _explained(error: Exception, watch: Watch, place: Launched) -> Exception:
    """The error to report on this rank. Usually it is that another rank is gone, which this rank noticed in an exchange."""
    words = watch.verdict(_LOST_S)
    if words is not None:
        return ConnectionError(f"rank {place.rank} ends: {words}")
    watch.failed(str(error))
    return error


def make_spread(config: TrainConfig, model: Model, mesh: Mesh) -> Spread | None:
    """This rank's share of a run; None for a single process that sums in the default order."""
    plan, tree = config.parallel, config.accumulate == "tree"
    if plan == Plan() and not tree:
        return None
    order = [name for name, _ in model.named_parameters()]
    first = next(model.parameters())
    tokens = config.row_tokens * config.micro_rows // (plan.tp if plan.sp else 1) // plan.cp
    stream = torch.empty(tokens, model.config.hidden_size, dtype=first.dtype, device="meta")
    part = make_part(model, plan, mesh, invariant=tree)
    layers = model.config.num_hidden_layers
    pipeline = Pipeline(part.model, plan, mesh.pp, layers, stream, first.device) if plan.pp > 1 else None
    return Spread(plan, mesh, part, order, invariant=tree, pipeline=pipeline)


def plan_lines(config: TrainConfig, model: Model, device: torch.device) -> list[str]:
    """A description of what the plan needs: the memory of a rank at each stage of pp, and the idle time. `model` may be on
    "meta".

    Raises:
        ValueError: the plan cannot divide this model, or a rank needs more memory than its GPU has.
    """
    plan, shape = config.parallel, model.config
    if (why := refusal(model, plan)) is not None:
        raise ValueError(why)
    if config.lora_rank:
        return [f"parallel: {plan.ranks} ranks = dp {plan.dp}", f"of a rank: {plan_memory(config, model, device)}"]
    product = " x ".join(f"{name} {getattr(plan, name)}" for name in ("pp", "dp", "cp", "tp") if getattr(plan, name) > 1)
    found = [f"parallel: {plan.ranks} ranks = {product or 'one'}"]
    q, kv = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    for stage in range(plan.pp):
        need = predicted(
            plan, sizes_of(model), stage, item=dtype_of(config).itemsize, moments=STATE_BYTES[config.optimizer],
            micro_batches=config.micro_batches, tree=config.accumulate == "tree", tokens=config.row_tokens * config.micro_rows,
            cut_width=2 * (q + 2 * kv) + q + feed_forward_numbers(shape), whole_width=6 * shape.hidden_size + q,
        )  # fmt: skip
        if config.loss != "next-token":  # each rank has the complete reference model
            need = replace(need, weights=need.weights + weight_bytes_of(model))
        where = f"a rank at place {stage} of pp" if plan.pp > 1 else "a rank"
        found.append(f"memory of {where}: {need}")
        if device.type == "cuda" and need.total > (there := memory_bytes(device)):
            raise ValueError(f"{found[-1]}: this is more than the {there / 2**30:.1f} GiB of {device}; raise tp, pp or zero")
    if plan.pp > 1:
        own = config.micro_batches // plan.dp
        found.append(f"pipeline: {bubble(plan, own):.1%} of an update is idle, by the formula for schedule {plan.schedule}")
    if plan.ranks > 1 and config.accumulate == "tree":
        wide = 4 // dtype_of(config).itemsize
        more = f", and between slices of layers {wide} times its bytes" if plan.tp > 1 and wide > 1 else ""
        found.append(
            f"sums: in the order of the summation tree, in two rounds where the library needs one{more}; accumulate "
            "= running uses the library's order"
        )
    elif plan.ranks > 1:
        found.append(
            "sums: in the library's order, so that results differ in rounding between plans; accumulate = tree makes "
            "them bitwise equal"
        )
    return found


def quiet(words: str) -> None:
    """Print nothing; used by all ranks except the first."""
