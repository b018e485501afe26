"""A comparison that nobody measured, with the shape of a real one: ResNet-50, batch 32, ours against eager on an H100."""

import math
import random
from dataclasses import replace
from itertools import accumulate
from typing import Any

from tilewright.bench.compare.results import Comparison, Counter, Interval, Point, Run, Segment, Side, Verdict

NASTY = "<script>window.hacked = true</script><img src=x onerror='window.hacked = true'>\"'&|`"
_BATCH = 32
_CEILINGS = {"bytes_per_s": 3.02e12, "flops_per_s.fp16": 768e12, "flops_per_s.fp32": 51.3e12, "flops_per_s.tf32": 348e12}


def resnet50(claim: float = 1.5, open_points: int = 0, name: str = "", seed: int = 0) -> Comparison:
    """The whole of it; `name` is added to what a model or an engine may choose: layers, engine, facts, reasons."""
    rng = random.Random(seed)
    segments = [_segment(*layer, claim, rng, name if i == 3 else "") for i, layer in enumerate(_layers())]
    ours = _side("optimize:fp16" + name, [s.ours for s in segments], segments, 6e-6, rng)
    baseline = _side("eager" + name, [s.baseline for s in segments], segments, 95e-6, rng)
    verdicts = [segment.verdict for segment in segments]
    verdict: Verdict = "fail" if "fail" in verdicts else "undecided" if "undecided" in verdicts else "pass"
    value = baseline.whole.value / ours.whole.value
    return Comparison(
        model="resnet50@32" + name,
        claim=claim,
        confidence=0.95,
        verdict=verdict,
        ratio=Interval(value, value * 0.99, value * 1.01),
        segments=segments,
        ours=ours,
        baseline=baseline,
        card=_card(open_points, name),
        fusions=_fusions(name),
        tuning=_tuning(name),
        ceilings=_CEILINGS,
        environment={"machine": "NVIDIA H100 80GB HBM3", "torch": "2.11.0+cu130", "triton": "3.6.0", "note": name},
        seconds=118.4,
    )


def passing(comparison: Comparison) -> Comparison:
    """The same where every segment passes."""
    segments = [replace(s, verdict="pass", ratio=Interval(2.0, 1.8, 2.2)) for s in comparison.segments]
    return replace(comparison, segments=segments, verdict="pass")


def counting(comparison: Comparison, name: str = "") -> Comparison:
    """The same where the baseline has counters, 10 % above its times, a copy of its own, and ours has failed to count."""
    found = [
        Counter(name=f"node {i} + relu{name}", kind=f"kernel{name}", seconds=1.1 * s.baseline.value, layers=s.layers)
        for i, s in enumerate(comparison.segments)
    ]
    found.append(Counter(name=f"Reorder{name}", seconds=1e-6))
    ours = replace(comparison.ours, counters_note=f"it would not say{name}")
    return replace(comparison, ours=ours, baseline=replace(comparison.baseline, counters=found))


def _layers() -> list[tuple[str, list[str], float, float]]:
    """Name, modules, FLOPs, and bytes in fp16, of each segment."""
    found = [_conv("conv1", 3, 64, 7, 224, 2), ("maxpool", ["maxpool"], 0.0, 2.0 * _BATCH * 64 * (112**2 + 56**2))]
    channels, size = 64, 56
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), 1):
        for block in range(blocks):
            stride = 2 if stage > 1 and block == 0 else 1
            where = f"layer{stage}.{block}"
            found.append(_conv(f"{where}.conv1", channels, width, 1, size, 1))
            found.append(_conv(f"{where}.conv2", width, width, 3, size, stride))
            last = _conv(f"{where}.conv3", width, 4 * width, 1, size // stride, 1)
            if block == 0:
                # The engine adds the shortcut as it writes: one segment of two layers.
                short = _conv(f"{where}.downsample.0", channels, 4 * width, 1, size, stride)
                last = (f"{last[0]} + downsample", [last[0], short[0]], last[2] + short[2], last[3] + short[3])
            found.append(last)
            channels, size = 4 * width, size // stride
    found.append(("avgpool", ["avgpool"], 2048.0 * 49 * _BATCH, 2.0 * _BATCH * 2048 * 50))
    found.append(("fc", ["fc"], 2.0 * _BATCH * 2048 * 1000, 2.0 * (2048 * 1000 + _BATCH * 3048)))
    return found


def _conv(name: str, c: int, k: int, r: int, size: int, stride: int) -> tuple[str, list[str], float, float]:
    out = size // stride
    flops = 2.0 * _BATCH * out * out * k * c * r * r
    return name, [name], flops, 2.0 * (_BATCH * (size * size * c + out * out * k) + k * c * r * r)


def _segment(name: str, layers: list[str], flops: float, size: float, claim: float, rng: random.Random, more: str) -> Segment:
    bound = max(flops / _CEILINGS["flops_per_s.fp16"], size / _CEILINGS["bytes_per_s"])
    ours = bound / rng.uniform(0.55, 0.85) + 1.2e-6
    baseline = max(flops / _CEILINGS["flops_per_s.tf32"], 2 * size / _CEILINGS["bytes_per_s"]) / rng.uniform(0.35, 0.7) + 4e-6
    value = baseline / ours
    if name in ("layer2.1.conv2", "layer4.2.conv2"):
        value = claim * 0.88
    if name == "fc":
        value = claim * 1.1
    width = rng.uniform(1.02, 1.09) if name != "fc" else 1.5
    low, high = value / width, value * width
    if name == "avgpool":
        high = math.inf
    verdict: Verdict = "pass" if low >= claim else "fail" if high < claim else "undecided"
    baseline = value * ours
    return Segment(
        name=name + more,
        layers=[layer + more for layer in layers],
        ours=Interval(ours, ours * 0.97, ours * 1.03),
        baseline=Interval(baseline, baseline * 0.97, baseline * 1.03),
        ratio=Interval(value, low, high),
        verdict=verdict,
        flops=flops,
        bytes=size,
    )


def _side(engine: str, times: list[Interval], segments: list[Segment], overhead: float, rng: random.Random) -> Side:
    total = sum(t.value for t in times) + overhead
    whole = total * 0.985 if engine.startswith("optimize") else total * 1.012
    ours = engine.startswith("optimize")
    return Side(
        engine=engine,
        facts={
            "precision": "fp16" if ours else "fp32 (tf32 convolutions)",
            "device": "cuda:0 (NVIDIA H100 80GB HBM3)",
            "versions": {"tilewright": "0.1.0", "triton": "3.6.0"} if ours else {"torch": "2.11.0+cu130", "cudnn": "9.19"},
            "graph": "cuda graph" if ours else False,
            "copies": "in" if ours else "none",
            "clock": "cuda events",
            "inputs": [f"float32[{_BATCH},3,224,224]"],
            "threads": 16,
            "build_s": 41.2 if ours else 0.3,
        },
        whole=Interval(whole, whole * 0.995, whole * 1.005),
        layers={segment.name: time for segment, time in zip(segments, times)},
        overhead=Interval(overhead, overhead * 0.8, overhead * 1.2),
        residual=0.012,
        additive=True,
        output_error=1.1e-3 if ours else 4.2e-4,
        precision="fp16/tf32",
        runs=list(_runs(total, times, 0.0 if ours else 0.4, rng)),
    )


def _runs(total: float, times: list[Interval], offset: float, rng: random.Random) -> list[Run]:
    """30 variants in 14 rounds: the whole, prefixes, and the model without one layer."""
    prefixes = list(accumulate(t.value for t in times))
    variants = {"whole": total, "empty": 6e-6}
    variants |= {f"first {i}": prefixes[i - 1] for i in range(2, len(times), 4)}
    variants |= {f"without {i}": total - times[i].value for i in range(3, len(times), 4)}
    found = []
    for turn in range(14):
        order = list(variants)
        rng.shuffle(order)
        for i, variant in enumerate(order):
            drift = 1 + 0.01 * turn / 14
            late = 1.15 if rng.random() < 0.02 else 1.0
            took = variants[variant] * drift * late * rng.lognormvariate(0, 0.012)
            found.append(Run(at=8 * turn + 0.2 * i + offset, variant=variant, seconds=took))
    return found


def _card(open_points: int, more: str) -> list[Point]:
    closed = [
        (
            "precision",
            "fp16; error 1.1e-03: fp16/tf32",
            "fp32 (tf32 convolutions); error 4.2e-04: fp16/tf32",
            "Both compute in what they say.",
        ),
        ("batch and shapes", "float32[32,3,224,224]", "float32[32,3,224,224]", "The same shapes."),
        ("graph capture", "cuda graph", "no", "They differ, as they do for a user of both; see the overhead."),
        ("copies in a call", "in", "none", "The baseline's time holds no copy that ours does not."),
        ("versions", "tilewright 0.1.0, triton 3.6.0", "torch 2.11.0+cu130, cudnn 9.19", "Both told: it can be repeated."),
        ("clocks", "1755 to 1740 of 1980 MHz", "1755 to 1740 of 1980 MHz", "One card, interleaved."),
        ("machine load", "load 0.6 before", "load 0.6 before", "Others used 2% of the processors meanwhile."),
    ]
    points = [
        Point(name=name, ours=ours, baseline=theirs + more, open=False, why=why + more) for name, ours, theirs, why in closed
    ]
    wrong = "eager says fp32, but computes in bf16"
    points[0] = replace(points[0], open=True, why=wrong + more) if open_points > 0 else points[0]
    points[5] = replace(points[5], open=True, why="The card slows itself down: power cap.") if open_points > 1 else points[5]
    return points


def _fusions(more: str) -> list[dict[str, Any]]:
    found = []
    for name, layers, _, _ in _layers():
        for anchor in layers:
            if "conv" not in anchor and "downsample" not in anchor:
                continue
            size = _BATCH * 56 * 56 * 64 * 2
            parts = (
                [("batch_norm", "bn"), ("activation", "relu")]
                if "conv3" not in anchor
                else [("batch_norm", "bn"), ("residual", "add"), ("activation", "relu")]
            )
            if "downsample" in anchor:
                parts = parts[:1]
            for kind, node in parts:
                decision = {"anchor": anchor, "kind": kind, "node": f"{anchor}.{node}", "taken": True, "bytes_saved": size}
                found.append({**decision, "reason": f"{kind} of one use, in the epilogue{more if name == 'conv1' else ''}"})
    found.append(
        {
            "anchor": "conv1", "kind": "max_pool", "node": "maxpool" + more, "taken": False, "bytes_saved": 51380224,
            "reason": "a window of pixels spans tiles" + more,
        }
    )  # fmt: skip
    found.append(
        {
            "anchor": "fc", "kind": "mean", "node": "avgpool", "taken": False, "bytes_saved": 262144,
            "reason": "a reduction over rows does not fit the product's loads",
        }
    )  # fmt: skip
    return found


def _tuning(more: str) -> list[dict[str, Any]]:
    sources = ["tuned on this card, 2026-11-21", "nearest bucket: M=131072", "analytical model"]
    found = []
    for i, (name, _, flops, _) in enumerate(_layers()):
        if flops and "pool" not in name:
            config = {"BLOCK_M": 128, "BLOCK_N": 64 << i % 3, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3 + i % 2}
            op = "linear" if name == "fc" else "conv2d"
            found.append(
                {
                    "layer": name,
                    "op": op,
                    "implementation": "sm90",
                    "config": config,
                    "source": sources[i % 3] + more * (i == 4),
                }
            )
    return found
