"""The analytical model: hand-computed launches, what must never make one faster, real kernels, and the published regret."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.source import ROOT
from tilewright.asm.certificate import config_facts, config_key
from tilewright.hw.ceilings import Ceilings
from tilewright.hw.device import Device, device_named
from tilewright.op import Inputs, Op
from tilewright.ops import ALL
from tilewright.tune.constants import CONSTANTS, Constants, constants_of
from tilewright.tune.model import Held, Work, predict, predict_all, seconds_of
from tilewright.tune.unmeasured import rank

H100 = device_named("h100")
CARD = Device(kind="cuda", name="paper", arch=90, sms=100, smem_bytes=232448)
CEILINGS = Ceilings(copy=1e12, read=1e12, write=1e12, l2=1e13, flops={"bf16": 1e14, "fp32": 1e13}, source="measured on paper")
# Whatever is not asked about costs nothing.
FREE: dict[str, Any] = {
    **dict.fromkeys(Constants._fields, 0.0), "source": "fitted on paper", "warpgroup_rows": 64, "warp_tile": 1e-9,
    "fetch": 1e30, "operations": 1e30, "warp_fetch": 1e30, "warp_operations": 1e30, "warpgroup": 1.0, "warp": 1.0,
    "memory": 1.0, "library": 1.0, "library_narrow": 0.1, "library_narrow_memory": 0.5,
}  # fmt: skip
NOTHING: dict[str, Any] = {"blocks": 100, "flops": 0.0, "unit": "bf16", "dram_bytes": 0.0, "l2_bytes": 0.0}
TILE = {"tile_m": 128, "tile_n": 128}


def seconds(
    work: dict[str, Any], constants: dict[str, float] | None = None, *, warps: int = 4, resident: int = 1, spills: int = 0
) -> float:
    found = seconds_of(
        Work(**{**NOTHING, **work}), Held(warps, resident, spills), CARD, CEILINGS, Constants(**{**FREE, **(constants or {})})
    )
    return float(found)


@pytest.mark.parametrize(
    ("work", "constants", "held", "wanted"),
    [
        ({"dram_bytes": 1e9}, {}, {}, 1e-3),
        ({"dram_bytes": 1e9}, {"memory": 0.8, "launch_s": 1e-4}, {}, 1.25e-3 + 1e-4),
        # 1e10 operations at 1e14 a second on 100 SMs
        ({"flops": 1e10, **TILE}, {}, {}, 1e-4),
        ({"flops": 1e10, **TILE}, {"warpgroup": 0.5}, {}, 2e-4),
        # one block more than SMs: 101 blocks of 1e8 operations, 1e-4 s each, in two waves
        ({"flops": 101e8, "blocks": 101, **TILE}, {}, {}, 2e-4),
        # two an SM share its tensor cores: as long as one after the other
        ({"flops": 200e8, "blocks": 200, **TILE}, {}, {"resident": 2}, 2e-4),
        # 32 rows are no warpgroup's: a warp's instructions, at half their best with 32 x 64 / 4 elements a warp
        ({"flops": 1e10, "tile_m": 32, "tile_n": 64}, {"warp": 0.5, "warp_tile": 512.0}, {}, 4e-4),
        # ten trips of 1 us, of which four are under way
        ({"steps": 10, "depth": 4}, {"latency_s": 1e-6}, {}, 2.5e-6),
        # a trip hides behind products that take longer, products that wait for one another hide behind nothing
        ({"steps": 10, "flops": 1e10, **TILE}, {"latency_s": 1e-6}, {}, 1e-4),
        ({"steps": 10, "flops": 1e10, "chain": 3, **TILE}, {"chain_s": 1e-6}, {}, 1e-4 + 3e-5),
        # an end for each wave; of two resident blocks a part of it is hidden, but not the last one's
        ({"blocks": 200, "rounds": 2}, {"start_s": 1e-6, "round_s": 2e-6}, {}, 1e-5),
        ({"blocks": 400, "rounds": 2}, {"start_s": 1e-6, "round_s": 2e-6, "hidden": 0.4}, {"resident": 2}, 2 * 3e-6 + 2e-6),
        # 1 MB of each of 100 blocks at 1e10 bytes a second, a spill of 1 KB doubles it
        ({"l2_bytes": 1e8}, {"fetch": 1e10}, {}, 1e-4),
        ({"l2_bytes": 1e8}, {"fetch": 1e10, "spill": 1.0}, {"spills": 1024}, 2e-4),
        # loads of 2 bytes are eight times as many instructions
        ({"l2_bytes": 1.6e9}, {"operations": 1e10, "load": 2.0}, {}, 2e-4),
        ({"l2_bytes": 1.6e9, "vector": 2}, {"operations": 1e10, "load": 2.0}, {}, 1.6e-3),
        # a walk of 50 steps among blocks of 5, the mean
        ({"blocks": 1000, "steps": 5, "longest": 50}, {"step_s": 1e-6}, {"resident": 10}, 5e-5),
        # as long as each other: the fourth root of two
        ({"dram_bytes": 1e8, "flops": 1e10, **TILE}, {}, {}, 2**0.25 * 1e-4),
        # a persistent kernel has one program an SM, whatever would fit
        ({"blocks": 300, "rounds": 1, "persistent": True}, {"round_s": 1e-6, "hidden": 0.5}, {"resident": 4}, 3e-6),
        ({"library": True, "dram_bytes": 1e9, "flops": 1e10}, {"library_s": 1e-6}, {}, 1e-3 + 1e-6),
        ({"library": True, "flops": 1e10, "vector": 2}, {}, {}, 1e-3),
    ],
)
def test_by_hand(work: dict[str, Any], constants: dict[str, float], held: dict[str, int], wanted: float) -> None:
    assert seconds(work, constants, **held) == pytest.approx(wanted, rel=1e-6)


BUSY: dict[str, Any] = {
    "blocks": 1000, "flops": 1e11, "dram_bytes": 1e8, "l2_bytes": 5e8, "steps": 20, "depth": 3, "operations": 1e9, "chain": 2,
    "rounds": 2, "end_bytes": 1e4, "tile_m": 128, "tile_n": 64,
}  # fmt: skip


@pytest.mark.parametrize("factor", [1.01, 2.0, 30.0])
@pytest.mark.parametrize("what", ["flops", "dram_bytes", "l2_bytes", "operations", "chain", "rounds", "end_bytes", "spills"])
def test_more_work_is_never_faster(what: str, factor: float) -> None:
    constants = CONSTANTS[90]._asdict()
    if what == "spills":
        assert seconds(BUSY, constants, spills=int(100 * factor)) >= seconds(BUSY, constants, spills=100)
    else:
        assert seconds({**BUSY, what: BUSY[what] * factor}, constants) >= seconds(BUSY, constants)


def test_more_loads_under_way_are_never_slower() -> None:
    times = [seconds({**BUSY, "depth": depth}, CONSTANTS[90]._asdict()) for depth in (2, 3, 4, 8)]
    assert times == sorted(times, reverse=True)


def test_one_block_too_many_costs_a_wave() -> None:
    each = {"flops": 1e8, **TILE}
    times = [seconds({**each, "blocks": n, "flops": n * 1e8}) for n in (1, 99, 100, 101, 200, 201)]
    assert times == pytest.approx([1e-4, 1e-4, 1e-4, 2e-4, 2e-4, 3e-4])


# ---- real kernels

DIMS: dict[str, list[dict[str, Any]]] = {
    "linear": [
        {"M": 1, "N": 4096, "K": 4096}, {"M": 16, "N": 1000, "K": 4096}, {"M": 300, "N": 2048, "K": 1000},
        {"M": 64, "N": 512, "K": 512, "layout": "nn", "activation": "silu_mul"}, {"M": 20, "N": 64, "K": 96, "batch": 3},
    ],
    "rms_norm": [{"M": 100, "N": 4096}, {"M": 10, "N": 40000}],
    "add_rms_norm": [{"M": 100, "N": 1000}],
    "layer_norm": [{"M": 7, "N": 50257}],
    "softmax": [{"M": 100, "N": 333}, {"M": 3, "N": 131072}],
    "paged_attention": [{"B": 3, "KV": 500}, {"B": 2, "KV": 700, "Q": 300}, {"B": 4, "KV": 900, "window": 128}],
}  # fmt: skip
BY_RULE = ("split",)
"""Implementations that `Op.first` names where they pay; the model does not predict programs that wait for each other."""
CASES = [(next(op for op in ALL if op.name == name), dims) for name, all_dims in DIMS.items() for dims in all_dims]


@pytest.mark.parametrize(("op", "dims"), CASES, ids=lambda v: v.name if isinstance(v, Op) else str(v))
def test_work_of_every_implementation(op: Op, dims: dict[str, Any]) -> None:
    """At least what the op cannot avoid; a space at once gives what its configs give one by one."""
    assert op.make is not None
    args = op.make(Inputs("meta"), **dims)
    values = op.make(Inputs("cpu"), **dims) if op.name == "paged_attention" else args
    cost, problem = op.cost(*values), op.problem(*args)
    checked = 0
    for impl in op.impls:
        if impl.refusal(H100, problem) is not None:
            continue
        if impl.name in BY_RULE and impl.work is None:
            continue
        assert impl.work is not None, f"{op.name} {impl.name} has no work"
        configs = list(impl.space.configs(H100, problem)) if impl.space.axes else []
        configs = configs or [impl.space.default(H100, problem)]
        configs = configs[:: max(1, len(configs) // 12)]
        together = impl.work(H100, {name: np.array([c[name] for c in configs]) for name in configs[0]}, *args)
        for i, config in enumerate(configs):
            work = impl.work(H100, config, *args)
            # A vector of N columns that all rows share may count once more or less.
            assert work.dram_bytes >= 0.98 * cost.bytes
            assert work.flops + 4 * work.operations >= 0.99 * cost.flops
            for name, one, many in zip(Work._fields, work, together, strict=True):
                if name != "unit":
                    assert np.allclose(np.broadcast_to(many, len(configs))[i], one), f"{impl.name} {config}: {name}"
            checked += 1
    assert checked


def test_attention_on_meta_tensors_takes_the_table_for_the_lengths() -> None:
    op = next(op for op in ALL if op.name == "paged_attention")
    assert op.make is not None
    meta, real = (op.make(Inputs(where), B=3, KV=512, Q=64) for where in ("meta", "cpu"))
    for impl in op.impls[1:]:
        assert impl.work is not None
        config = impl.space.default(H100, op.problem(*real))
        assert impl.work(H100, config, *meta) == impl.work(H100, config, *real)


def test_predict_says_what_limits() -> None:
    op = next(op for op in ALL if op.name == "linear")
    facts = config_facts("linear", "triton", 90)
    said = {}
    for m in (1, 8192):
        args = (
            torch.empty(m, 4096, dtype=torch.bfloat16, device="meta"),
            torch.empty(8192, 4096, dtype=torch.bfloat16, device="meta"),
        )
        args = (*args, None, "none", None)
        impl = next(impl for impl in op.impls if impl.name == "triton")
        assert impl.work is not None
        configs = [c for c in impl.space.configs(H100, op.problem(*args)) if config_key(c) in facts]
        times = predict_all(H100, impl.work, configs, [facts[config_key(c)] for c in configs], args)
        config = configs[int(np.argmin(times))]
        said[m] = predict(H100, impl.work(H100, config, *args), facts[config_key(config)])
        assert said[m].seconds == pytest.approx(min(times))
    assert said[1].limiter == "memory"
    assert said[8192].limiter in ("math", "fetch")
    assert said[1].fitted
    assert 0 < said[1].occupancy <= 1


def test_cards_without_constants() -> None:
    assert not constants_of(103).source.startswith("fitted")
    assert constants_of(89).warpgroup_rows == 0
    with pytest.raises(ValueError, match="no constants for sm_75; it supports sm_80 and newer"):
        constants_of(75)
    with pytest.raises(ValueError, match=r"H100.* has no fp4 unit; it has .*bf16"):
        predict(H100, Work(**{**NOTHING, "unit": "fp4"}), None)
    with pytest.raises(ValueError, match="needs the facts"):
        predict(H100, Work(**NOTHING), None)


# ---- order


def test_rank_is_ordered_and_valid() -> None:
    op = next(op for op in ALL if op.name == "linear")
    assert op.make is not None
    args = op.make(Inputs("meta"), M=16, N=4096, K=4096)
    problem = op.problem(*args)
    impls = [impl for impl in op.impls if impl.refusal(H100, problem) is None]
    ranked = list(rank("linear", H100, problem, args, impls))
    assert [r.seconds for r in ranked] == sorted(r.seconds for r in ranked)
    assert {"skinny", "triton", "vendor"} <= {r.impl.name for r in ranked}
    assert all(r.impl.space.refusal(H100, problem, r.config) is None for r in ranked)
    assert not any(r.impl.name == "gemv" for r in ranked)


# ---- the study


def test_regret_is_what_is_published(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import regret_tables
    from regret_model import Study
    from regret_store import read

    _, rows, _ = read(ROOT / "benchmarks/results/h100/regret.json")
    study = Study(rows)
    us = study.predicted_us(CONSTANTS[90])
    first, some = study.regret(us, 1), study.regret(us, 8)
    assert np.median(first) <= 0.10
    assert np.median(some) <= 0.03
    assert np.quantile(some, 0.95, method="inverted_cdf") <= 0.10
    regret_tables.by_op(study, {"model": us}, [None] * len(study.keys))
    published = (ROOT / "docs/regret.md").read_text()
    stale = [line for line in capsys.readouterr().out.splitlines() if "model, top" in line and line not in published]
    assert not stale, "docs/regret.md is older than the constants; its first lines tell how to make it"
