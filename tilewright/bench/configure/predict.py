"""Predicts what a configuration can serve, from bytes and FLOPs alone: a steady state of continuous batching.

With B answers in the batch, prompts of P and answers of O tokens, each step computes B tokens of answers and, on average, B P /
O tokens of prompts, because each answer that ends lets the next prompt in. A step reads the weights, and the keys and values of
the batch, once. From its time follow the inter-token latency (a step), the time to the first token (the steps of a prompt, and
waiting for room in a step) and the rate (B / (O steps)). The capacity of a configuration is the rate with the largest B that
meets the objectives.
"""

import math
import random
from dataclasses import dataclass, replace

from tilewright.bench.load.slo import Slo

__all__ = ["Facts", "Machine", "Point", "Prediction", "Workload", "machines_around", "predict"]


@dataclass(frozen=True, kw_only=True, order=True)
class Point:
    """A configuration. `quantize` and `kv_cache` None: the model's dtype."""

    replicas: int = 1
    max_seqs: int = 64
    max_tokens_per_step: int = 2048
    quantize: str | None = None
    kv_cache: str | None = None

    def __str__(self) -> str:
        said = f"{self.replicas} x {self.max_seqs} sequences, {self.max_tokens_per_step} tokens a step"
        return said + f", weights {self.quantize or 'as they are'}, cache {self.kv_cache or 'as the model'}"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The sizes of a model."""

    parameters: int
    dtype_bytes: int
    kv_elements: int
    """Elements that a token adds to the cache, for all layers together."""
    max_model_len: int


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine. Rates are those that are reached in practice, not those of a data sheet."""

    devices: int
    flops_per_s: float
    """FLOP/s of one device, in the model's dtype."""
    bytes_per_s: float
    memory_bytes: int
    """Memory of one device for weights and cache."""
    step_s: float
    """Seconds of a step without its computations: launches, scheduling, sampling."""
    fast_formats: tuple[str, ...] = ()
    """Formats whose products run at twice the rate."""
    most_seqs: int = 512
    """Most sequences at once that the engine accepts on this machine; the next field is the same for tokens in a step."""
    most_tokens: int = 8192


def machines_around(machine: Machine, count: int, seed: int = 0) -> list[Machine]:
    """The machine itself, and random variants of it, since its real speed is unknown.

    Their rates are 0.4 to 1.2 times those of the machine, and their steps take half to five times as long.
    """
    rng = random.Random(seed)

    def other() -> Machine:
        flops, copies = (math.exp(rng.uniform(math.log(0.4), math.log(1.2))) for _ in range(2))
        step = math.exp(rng.uniform(math.log(0.5), math.log(5)))
        return replace(
            machine,
            flops_per_s=machine.flops_per_s * flops,
            bytes_per_s=machine.bytes_per_s * copies,
            step_s=machine.step_s * step,
        )

    return [machine, *(other() for _ in range(count - 1))]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Mean tokens."""

    prompt: int
    output: int


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A predicted steady state. `goodput`: requests per second that meet the objectives. `limit`: what limits it."""

    goodput: float
    batch: int
    ttft_s: float
    itl_s: float
    limit: str


_WEIGHT_BYTES = {"int8": 1.0, "int8-weight": 1.0, "fp8": 1.0, "fp8-block": 1.0, "mxfp8": 1.03, "int4": 0.56}


def predict(point: Point, facts: Facts, machine: Machine, workload: Workload, slo: Slo) -> Prediction:
    """The steady state of a configuration."""
    per_weight = _WEIGHT_BYTES.get(point.quantize or "", float(facts.dtype_bytes))
    weights = facts.parameters * per_weight
    kv_token = facts.kv_elements * (1 if point.kv_cache else facts.dtype_bytes)
    sharing = max(1.0, point.replicas / machine.devices)
    room = machine.memory_bytes / sharing - weights
    context = workload.prompt + workload.output / 2
    fits = int(room / (kv_token * (workload.prompt + workload.output)))
    if fits < 1:
        return Prediction(goodput=0.0, batch=0, ttft_s=math.inf, itl_s=math.inf, limit="memory")
    flops = machine.flops_per_s * (2 if point.quantize in machine.fast_formats else 1) / sharing
    bandwidth = machine.bytes_per_s / sharing
    most = min(point.max_seqs, fits)
    limit = "memory" if fits < point.max_seqs else "max_seqs"
    low, high, best = 1, most, None
    while low <= high:  # latencies grow with the batch: find the largest batch that meets the objectives by bisection
        batch = (low + high) // 2
        prompts = min(batch * workload.prompt / workload.output, max(1.0, point.max_tokens_per_step - batch))
        seconds = machine.step_s + max(
            (weights + batch * context * kv_token) / bandwidth, 2 * facts.parameters * (batch + prompts) / flops
        )
        # Fewer prompt tokens fit into a step than are needed to keep the batch full: answers wait for prompts.
        slowed = max(1.0, batch * workload.prompt / workload.output / prompts)
        chunk = max(1, min(workload.prompt, point.max_tokens_per_step - batch))
        worst_s = machine.step_s + max(weights / bandwidth, 2 * facts.parameters * (batch + chunk) / flops)
        ttft_s = slowed * (math.ceil(workload.prompt / chunk) + 0.5) * max(seconds, worst_s)
        rate = batch / (workload.output * seconds * slowed)
        latencies = {"ttft": ttft_s, "itl": max(seconds, worst_s), "tpot": seconds, "e2e": ttft_s + workload.output * seconds}
        if slo.kept_by(latencies):
            best, low = (batch, ttft_s, seconds, rate), batch + 1
        else:
            high, limit = batch - 1, "objective"
    if best is None:
        return Prediction(goodput=0.0, batch=0, ttft_s=math.inf, itl_s=math.inf, limit="objective")
    batch, ttft_s, seconds, rate = best
    # Users fill the batch up to max_seqs: if that is more than the objectives permit, nobody is served well.
    share = 1.0 if batch == most else (batch / most) ** 2
    return Prediction(goodput=rate * point.replicas * share, batch=batch, ttft_s=ttft_s, itl_s=seconds, limit=limit)
