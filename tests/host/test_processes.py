"""Models in processes of their own: what crosses the border, and what breaks behind it. One server process for all tests."""

import asyncio
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.host import models
from tests.host.asking import until
from tests.host.test_regions import open_files
from tilewright.host import intake, regions
from tilewright.host.compare import array_of
from tilewright.host.config import ModelConfig
from tilewright.host.errors import Failed, HostError, Refused
from tilewright.host.host import Host, Source
from tilewright.host.tensors import Wire
from tilewright.host.version import Ask

CONFIGS: dict[str, dict[str, Any]] = {
    "reshapes": {},
    "marked": {"batch_timeout_s": 1.0},
    "two": {},
    "whole": {},
    "raises": {},
    "ends": {},
    "nans": {"nan": "allow"},
    "padded": {"same_shape": True, "max_batch": 8},
    "slow": {"max_batch": 8, "inputs": {"x": (-1, -1)}, "max_bytes": 8 << 18},
}


class Running:
    """A host on its event loop, for tests that are not on it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.host = self(self._made())

    async def _made(self) -> Host:
        functions = {"nans": "marked", "padded": "marked"}
        sources = {
            name: Source(ModelConfig(source=f"{models.__name__}:{functions.get(name, name)}", threads=1, **config), None)
            for name, config in CONFIGS.items()
        }
        host = Host(sources=sources)
        for name in sources:
            with suppress(Refused):  # those that raise, or end, while they are loaded
                await host.load(name)
        return host

    def __call__(self, work: Any) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, 120))

    def ask(self, name: str, **arrays: np.ndarray) -> Any:
        return self(self.answered(name, **arrays))

    async def answered(self, name: str, **arrays: np.ndarray) -> dict[str, np.ndarray]:
        kinds = {"float32": "FP32", "int64": "INT64"}
        inputs = {key: Wire(kinds[str(a.dtype)], a.shape, a.tobytes()) for key, a in arrays.items()}
        answer = await self.host.infer(name, None, inputs, Ask())
        return {key: array_of(wire) for key, wire in answer.outputs.items()}


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    found = Running()
    yield found
    found(found.host.close())
    found.loop.close()


def rows(*marks: float) -> np.ndarray:
    x = np.random.default_rng(0).standard_normal((len(marks), 4), dtype=np.float32)
    x[:, 0] = marks
    return x


def marked(x: np.ndarray) -> np.ndarray:
    return torch.tanh(torch.from_numpy(x)).numpy() * np.arange(1.0, 5.0, dtype=np.float32)


def test_what_a_model_takes_and_gives_is_read_off_its_example(running: Running) -> None:
    found = {name: model.signature for name, model in running.host.models.items()}
    assert [tuple(s) for s in found["marked"].inputs] == [("x", "FP32", (-1, 4))]
    assert [tuple(s) for s in found["marked"].outputs] == [("output", "FP32", (-1, 4))]
    assert [tuple(s) for s in found["two"].inputs] == [("ids", "INT64", (-1, 3)), ("scale", "FP32", (-1, 1))]
    assert [(s.name, s.datatype) for s in found["two"].outputs] == [("scaled", "FP32"), ("half", "BF16"), ("positive", "BOOL")]
    assert [tuple(s) for s in found["whole"].inputs] == [("x", "FP32", (4, 2))]
    assert not found["whole"].batched


def test_a_model_that_cannot_be_loaded_is_one_sentence_and_the_rest_is_served(running: Running) -> None:
    assert "no weights here" in running.host.failed["raises"]
    assert "models.py:" in running.host.failed["raises"]
    assert running.host.failed["ends"].endswith("its process ended while it loaded the model")
    assert set(running.host.models) == set(CONFIGS) - {"raises", "ends"}


def test_tensors_of_all_kinds_come_back(running: Running) -> None:
    ids, scale = np.array([[1, -2, 3]], np.int64), np.array([[0.5]], np.float32)
    found = running.ask("two", ids=ids, scale=scale)
    assert found["scaled"].tolist() == [[0.5, -1.0, 1.5]]
    assert found["half"].tolist() == [[0.5, -1.0, 1.5]]
    assert found["positive"].tolist() == [[True, False, True]]
    x = np.random.default_rng(0).standard_normal((4, 2), dtype=np.float32)
    assert np.allclose(running.ask("whole", x=x)["output"], torch.from_numpy(x).softmax(0).numpy())
    with pytest.raises(Refused, match=r"has shape \[3, 2\], wanted \[4, 2\]"):
        running.ask("whole", x=x[:3])


def test_batched_answers_are_those_of_single_calls_bit_by_bit(running: Running) -> None:
    """Elementwise: a row's bits depend on nothing but the row, whatever shape it is computed in."""
    each = [rows(*np.random.default_rng(i).standard_normal(1 + i % 3)) for i in range(24)]

    async def together(name: str) -> list[dict[str, np.ndarray]]:
        return list(await asyncio.gather(*(running.answered(name, x=x) for x in each)))

    before = running.host.models["marked"].versions[1].stats.executions
    for name in ("marked", "padded"):
        alone = [running.ask(name, x=x)["output"] for x in each]
        for x, one, other in zip(each, alone, running(together(name)), strict=True):
            assert one.tobytes() == other["output"].tobytes()
            assert np.allclose(one, marked(x), rtol=1e-6)
    assert running.host.models["marked"].versions[1].stats.executions - before < 24 + 24  # some did share


def test_a_poisoned_row_costs_its_request_alone(running: Running) -> None:
    good = [rows(0.5), rows(0.25, 0.125)]

    async def together() -> list[Any]:
        asks = [running.answered("marked", x=x) for x in (rows(0.0), good[0], rows(-1.0), good[1], rows(-4.0), rows(-1.0, 1.0))]
        return list(await asyncio.gather(*asks, return_exceptions=True))

    _, one, raised, two, nan, more = running(together())
    assert np.array_equal(one["output"], marked(good[0]))
    assert np.array_equal(two["output"], marked(good[1]))
    assert str(raised) == str(more) == "model marked, version 1: the model raised RuntimeError: a poisoned row"
    assert isinstance(nan, Failed)
    assert "returned NaN in output 'output' for finite inputs" in str(nan)


def test_nans_that_a_client_sends_or_the_config_allows_are_answers(running: Running) -> None:
    x = rows(0.5)
    x[0, 1] = np.nan
    assert np.isnan(running.ask("marked", x=x)["output"][0, 1])
    assert np.isnan(running.ask("nans", x=rows(-4.0))["output"]).all()


def test_a_model_that_reshapes_its_input_in_place_and_gives_infinities(running: Running) -> None:
    for x in ([[1.0, -2.0, 3.0]], [[-1.0, 2.0, -3.0]]):  # the second batch lies where the first one lay
        found = running.ask("reshapes", x=np.array(x, np.float32))["output"]
        assert np.array_equal(found, np.sign(np.array(x, np.float32)) * np.inf)


@pytest.mark.parametrize("mark", [-2.0, -3.0], ids=["dies", "hangs"])
def test_a_process_that_is_lost_is_replaced_and_others_are_answered(running: Running, mark: float) -> None:
    async def together() -> list[Any]:
        victim = asyncio.gather(*(running.answered("padded", x=rows(0.1 * i)) for i in range(20)))
        found = await asyncio.gather(
            *(running.answered("marked", x=rows(m)) for m in (0.0, 0.5, mark, 0.25)), return_exceptions=True
        )
        assert len(await victim) == 20
        return list(found)

    restarts = running.host.models["marked"].versions[1].stats.restarts
    _, one, lost, two = running(together())
    assert np.array_equal(one["output"], marked(rows(0.5)))
    assert np.array_equal(two["output"], marked(rows(0.25)))
    assert isinstance(lost, Failed)
    assert "died, or hung and was killed" in str(lost)

    async def again() -> dict[str, np.ndarray]:
        while True:
            try:
                return await running.answered("marked", x=rows(0.5))
            except HostError:
                await asyncio.sleep(0.05)

    assert np.array_equal(running(again())["output"], marked(rows(0.5)))
    assert running.host.models["marked"].versions[1].stats.restarts >= restarts + 1


WIDTH = 1 << 16


def wide_rows(value: float, count: int = 8) -> np.ndarray:
    return np.full((count, WIDTH), value, np.float32)


def in_memory(folder: Path, count: int) -> regions.Regions:
    """A region `r` with `count` times `wide_rows`, of the values from 0 on."""
    (folder / "x").write_bytes(b"".join(wide_rows(value).tobytes() for value in range(count)))
    memory = regions.Regions(folder)
    memory.register("r", "x", 0, count * 8 * WIDTH * 4)
    return memory


def row_of(memory: regions.Regions, value: int, rows: int = 8) -> dict[str, Wire]:
    """The rows of this value, as an input."""
    size = 8 * WIDTH * 4
    return {"x": Wire("FP32", (rows, WIDTH), memory.part(regions.Place("r", value * size, rows * WIDTH * 4)))}


def test_large_inputs_are_read_while_the_model_computes(running: Running, tmp_path: Path) -> None:
    """Four batches, each read by several threads; computing one takes a tenth of a second."""
    version = running.host.models["slow"].versions[1]
    instance: Any = version._instances[0]
    assert len(instance._places) == 2
    for name in ("marked", "two"):  # a batch of theirs is soon laid out
        other: Any = running.host.models[name].versions[1]._instances[0]
        assert len(other._places) == 1
    memory, before = in_memory(tmp_path, 4), version.stats.executions

    async def ask(value: int) -> None:
        answer = await running.host.infer("slow", None, row_of(memory, value), Ask())
        assert (array_of(answer.outputs["output"]) == 2 * value).all()

    def read_ahead() -> bool:
        """Whether the last row of the second batch is there while the first one is computed."""
        if len(instance._batches) < 2 or version.stats.executions > before:
            return False
        row = slice(7 * WIDTH * 4, 8 * WIDTH * 4)
        return (np.frombuffer(instance._batches[1].place.arena.view[row], np.float32) == 1).all()

    async def all_of_them() -> None:
        asked = [asyncio.ensure_future(ask(value)) for value in range(4)]
        await until(read_ahead)
        await asyncio.gather(*asked)

    running(all_of_them())


def test_the_process_has_a_regions_file_until_nobody_names_the_region(running: Running, tmp_path: Path) -> None:
    version = running.host.models["slow"].versions[1]
    instance: Any = version._instances[0]

    def holders() -> int:
        """Processes that have the file open."""
        found = 0
        for process in (path.name for path in Path("/proc").iterdir() if path.name.isdigit()):
            with suppress(OSError):
                found += bool(open_files(tmp_path, process))
        return found

    memory = in_memory(tmp_path, 3)

    async def test() -> None:
        for value in (0, 2):
            answer = await running.host.infer("slow", None, row_of(memory, value), Ask())
            assert (array_of(answer.outputs["output"]) == 2 * value).all()
        assert holders() == 2  # this one, and the model's
        # Unregistered while a batch with it is under way.
        asked = asyncio.ensure_future(running.host.infer("slow", None, row_of(memory, 1), Ask()))
        await until(lambda: instance.busy)
        memory.unregister("r")
        answer = await asked
        assert (array_of(answer.outputs["output"]) == 2).all()
        del asked, answer
        await until(lambda: holders() == 0)

    running(test())


def test_what_cannot_be_read_is_the_error_of_its_request_alone(running: Running, tmp_path: Path) -> None:
    """Two requests share a batch with one whose file was truncated; some are read by one thread, some by several."""
    for rows in (1, 4):
        folder = tmp_path / str(rows)
        folder.mkdir()
        memory = in_memory(folder, 4)
        os.truncate(folder / "x", 2 * 8 * WIDTH * 4)

        async def test(memory: regions.Regions = memory, rows: int = rows) -> None:
            first = asyncio.ensure_future(running.host.infer("slow", None, row_of(memory, 1, 8), Ask()))
            await asyncio.sleep(0.02)
            ask = [running.host.infer("slow", None, row_of(memory, value, rows), Ask()) for value in (1, 3)]
            good, bad = await asyncio.gather(*ask, return_exceptions=True)
            assert not isinstance(good, BaseException)
            assert (array_of(good.outputs["output"]) == 2).all()
            assert isinstance(bad, Refused)
            assert "is shorter than it was" in str(bad)
            await first

        running(test())


def test_tables_of_reads_that_are_longer_than_a_packet(tmp_path: Path) -> None:
    """More rows than a packet can name."""
    most = intake.MAX_TABLE // 40
    part, count = in_memory(tmp_path, 1).part(regions.Place("r", 8, 16)), 2 * most + 1
    reads = intake.Reads()
    reads.extend(range(count), [part] * count, range(0, 16 * count, 16))
    tables = list(intake.packed(reads))
    assert [len(table) // 40 for table in tables] == [most, most, 1]
    whole = np.frombuffer(b"".join(tables), np.int64).reshape(count, 5)
    assert (whole[:, 0] == range(count)).all()
    assert whole[-1].tolist() == [count - 1, part.region.number, 8, 16, 16 * (count - 1)]


def test_outputs_that_need_more_memory_come_from_both_places(running: Running) -> None:
    instance = running.host.models["slow"].versions[1]._instances[0]

    async def together() -> list[Any]:
        return list(await asyncio.gather(*(running.answered("slow", x=wide_rows(value)) for value in range(5))))

    for value, found in enumerate(running(together())):
        assert (found["output"] == 2 * value).all()
    assert all(place.arena.size >= 2 * 8 * WIDTH * 4 for place in instance._places)


def test_who_is_more_urgent_is_computed_before_the_batch_that_was_handed_over(running: Running) -> None:
    version, order = running.host.models["slow"].versions[1], list[float]()

    async def ask(value: float, count: int, priority: int = 0) -> None:
        wire = Wire("FP32", (count, WIDTH), wide_rows(value, count).tobytes())
        answer = await running.host.infer("slow", None, {"x": wire}, Ask(priority))
        assert (array_of(answer.outputs["output"]) == 2 * value).all()
        order.append(value)

    async def together() -> None:
        large = [asyncio.ensure_future(ask(value, 8)) for value in (1, 2, 3)]
        await until(lambda: version._behind is not None)
        await asyncio.gather(ask(4, 1, -1), *large)

    executions = version.stats.executions
    running(together())
    assert order == [1, 4, 2, 3]
    assert version.stats.executions == executions + 4


def test_a_batch_behind_one_that_ends_the_process_is_computed_by_the_next_process(running: Running) -> None:
    async def together() -> list[Any]:
        asks = (running.answered("slow", x=wide_rows(value)) for value in (1.0, -2.0, 3.0))
        return list(await asyncio.gather(*asks, return_exceptions=True))

    descriptors = len(os.listdir("/proc/self/fd"))
    one, lost, behind = running(together())
    assert (one["output"] == 2).all()
    assert isinstance(lost, Failed)
    assert (behind["output"] == 6).all()
    assert running.host.models["slow"].versions[1].stats.restarts == 1
    assert len(os.listdir("/proc/self/fd")) == descriptors
