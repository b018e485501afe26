"""The cost model: fitted to some 20 measurements, held against others; and which device it takes for a batch."""

import random
import time

import numpy as np
import pytest

from tilewright.placement.choose import Choice, choose, crossovers
from tilewright.placement.cost import DeviceCost, Measurement, Work, fit

SIZES = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024]


def layer(batch: float, width: int = 2048, itemsize: int = 4) -> Work:
    return Work(flops=2 * batch * width * width, bytes=itemsize * (width * width + 2 * batch * width))


def truth(name: str, work: Work) -> float:
    """Devices that are not of the model's form: latency, a roofline by the sum of both, and waves."""
    launch, flops, copies, wave = {"cpu": (2e-6, 2e11, 3e10, 0.0), "gpu": (9e-6, 1.2e14, 2e12, 4e-6)}[name]
    return launch + max(work.flops / flops, work.bytes / copies) + 0.15 * min(work.flops / flops, work.bytes / copies) + wave


def measured(name: str, noise: float, seed: int, widths: tuple[int, ...] = (2048,)) -> list[Measurement]:
    """20 measurements."""
    rng = random.Random(seed)
    works = [layer(batch, width) for width in widths for batch in SIZES[:: len(widths)]]
    return [Measurement(work=work, seconds=truth(name, work) * np.exp(rng.gauss(0, noise))) for work in works]


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_sizes_that_were_not_fitted_are_within_12_percent(name: str) -> None:
    found = fit(name, measured(name, 0.03, 0))
    errors = [abs(found.seconds(layer(b)) / truth(name, layer(b)) - 1) for b in np.geomspace(1, 2048, 60)]
    print(f"{name}: mean {np.mean(errors):.1%}, worst {max(errors):.1%}")
    assert max(errors) <= 0.12


def test_the_right_device_in_95_percent_of_cells() -> None:
    widths = (128, 256, 512, 1024, 2048)
    devices = [fit(name, measured(name, 0.03, seed, widths)) for seed, name in enumerate(("cpu", "gpu"))]
    devices[1] = DeviceCost(**{**vars_of(devices[1]), "link_bytes_per_s": 2e10, "link_s": 1e-5})
    right = cells = 0
    for width in widths:
        for batch in SIZES:
            work, moved = layer(batch, width), 4.0 * batch * width
            true = [truth("cpu", work), truth("gpu", work) + 2 * (1e-5 + moved / 2e10)]
            took = choose(devices, work, bytes_in=moved, bytes_out=moved)
            right += true[took.index] <= 1.02 * min(true)
            cells += 1
    assert right / cells >= 0.95, f"{right} of {cells}"


def test_a_mixed_load_is_never_worse_than_the_best_single_device() -> None:
    devices = [fit(name, measured(name, 0.03, seed)) for seed, name in enumerate(("cpu", "gpu"))]
    works = [layer(batch) for batch in SIZES]
    chosen = sum(truth(devices[choose(devices, work).index].name, work) for work in works)
    assert chosen <= min(sum(truth(one.name, work) for work in works) for one in devices) / 0.99


def test_a_mixed_load_gains_where_both_devices_have_a_share() -> None:
    """Loads of random sizes, one piece of work after the other, by the times of devices that are not of the model's form.

    None is done slower than by the better device alone, within a hundredth. Where each of the two is the right one for a fourth
    of the time at least, 19 in 20 gain 1.15 or more.
    """
    widths = (128, 256, 512, 1024, 2048)
    devices = [fit(name, measured(name, 0.03, seed, widths)) for seed, name in enumerate(("cpu", "gpu"))]
    devices[1] = DeviceCost(**{**vars_of(devices[1]), "link_bytes_per_s": 2e10, "link_s": 1e-5})
    rng, mixed = random.Random(0), list[float]()
    for _ in range(500):
        small, large = rng.choice(widths), rng.choice(widths)
        share = rng.random()
        drawn = [
            (rng.choice(SIZES[:6]), small) if rng.random() < share else (rng.choice(SIZES[10:]), large) for _ in range(200)
        ]
        alone, chosen, right = [0.0, 0.0], 0.0, [0.0, 0.0]
        for batch, width in drawn:
            work, moved = layer(batch, width), 4.0 * batch * width
            true = [truth("cpu", work), truth("gpu", work) + 2 * (1e-5 + moved / 2e10)]
            took = choose(devices, work, bytes_in=moved, bytes_out=moved)
            alone = [a + b for a, b in zip(alone, true, strict=True)]
            chosen += true[took.index]
            right[true.index(min(true))] += min(true)
        gain = min(alone) / chosen
        assert gain >= 0.99
        if min(right) >= 0.25 * sum(right):
            mixed.append(gain)
    print(f"{len(mixed)} mixed loads: gain {min(mixed):.2f} to {max(mixed):.2f}, median {sorted(mixed)[len(mixed) // 2]:.2f}")
    assert len(mixed) >= 20
    assert sorted(mixed)[len(mixed) // 20] >= 1.15


def test_crossovers_and_words() -> None:
    cpu = DeviceCost(name="cpu", launch_s=1e-6, flops_per_s=1e11, bytes_per_s=1e12)
    gpu = DeviceCost(name="cuda:0", launch_s=5e-5, flops_per_s=1e14, bytes_per_s=1e12)
    found = crossovers([cpu, gpu], lambda batch: (Work(flops=1e6 * batch, bytes=1e3), 0.0, 0.0), 1024)
    assert [(first, name) for first, name in found] == [(1, "cpu"), (5, "cuda:0")]
    small = choose([cpu, gpu], Work(flops=1e6, bytes=1e3))
    assert isinstance(small, Choice)
    assert small.name == "cpu"
    assert "cuda:0" in small.why
    assert "launch" in small.why


def test_a_real_processor_is_predicted() -> None:
    """Products on this machine, fitted at ten sizes and asked at nine between. The best of several runs of each, and the
    median of the errors: others work here too."""
    import torch

    weight = torch.randn(256, 256)

    def seconds(batch: int) -> float:
        x = torch.randn(batch, 256)
        times = []
        for _ in range(30):
            began_s = time.perf_counter()
            torch.mm(x, weight)
            times.append(time.perf_counter() - began_s)
        return min(times)

    sizes = [16 * 2**i for i in range(8)]
    between = [24 * 2**i for i in range(7)]
    found = fit("cpu", [Measurement(work=layer(b, 256), seconds=seconds(b)) for b in sizes])
    errors = [abs(found.seconds(layer(b, 256)) / seconds(b) - 1) for b in between]
    print(f"median {np.median(errors):.1%}, worst {max(errors):.1%}")
    assert np.median(errors) < 0.5


@pytest.mark.parametrize(
    ("count", "seconds", "words"), [(3, 1.0, "needs at least 5 measurements"), (6, 0.0, "needs a time above 0 seconds")]
)
def test_bad_measurements_are_one_sentence(count: int, seconds: float, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        fit("cpu", [Measurement(work=layer(1), seconds=seconds)] * count)


def vars_of(one: DeviceCost) -> dict[str, object]:
    return {name: getattr(one, name) for name in one.__dataclass_fields__}
