"""Runs a recipe: its tasks run in stages, in processes on this machine or on Ray; a killed run can be continued.

The tasks are the same for every executor, and each output depends only on the order of the input. Therefore neither the number
of processes, nor the size of a chunk, nor an interruption changes the result. `RunResult.sha256` is a hash of all documents in
order.
"""

import fcntl
import hashlib
import json
import multiprocessing
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tilewright.data import tasks
from tilewright.data.recipe import Recipe
from tilewright.data.shards import write
from tilewright.data.stats import merged
from tilewright.data.steps import build
from tilewright.extras import needed
from tilewright.hw import env

__all__ = ["EXECUTORS", "RunResult", "run"]

EXECUTORS = ("local", "ray")
_LEAST_MEMORY = 512 << 20  # a process with its libraries needs 200 to 350 MB
_SHARE = 16  # memory for a chunk's documents, with their lines, words and indexes, is less than this many times its bytes

_CHUNK = 8 << 20  # small enough that a file of moderate size has chunks for every process
_FILE_BYTES = 256 << 20

Task = tuple[Callable[..., str], tuple[Any, ...], Path]
Say = Callable[[str], None]


class RunResult(NamedTuple):
    """The output folder, a hash over its documents, and the content of the report."""

    folder: Path
    sha256: str
    report: dict[str, Any]


def run(
    recipe: Recipe,
    out: Path,
    *,
    processes: int = 2,
    memory_bytes: int = 4 << 30,
    executor: str = "local",
    say: Say = lambda _: None,
) -> RunResult:
    """Clean the data that a recipe names into the folder `out`; a run of the same recipe and input is continued.

    Writes documents/*.jsonl, tokens/ if the recipe has a tokenizer, and report.json. Raises ValueError for a recipe that cannot
    run, an `out` that belongs to another run, or too little memory, and OSError if a worker died.
    """
    if executor not in EXECUTORS:
        raise ValueError(f"executor is {executor!r}, wanted one of {', '.join(EXECUTORS)}")
    if processes < 1 or memory_bytes < processes * _LEAST_MEMORY:
        raise ValueError(
            f"processes is {processes} and the memory is {memory_bytes >> 20} MB; wanted at least one process, and "
            f"{_LEAST_MEMORY >> 20} MB for each"
        )
    for step in recipe.step:
        build(step)
    if recipe.tokens:
        tasks.end_of_text(recipe)
    fingerprint = recipe.fingerprint()
    out.mkdir(parents=True, exist_ok=True)
    with _locked(out):
        if (out / "report.json").is_file():
            report = json.loads((out / "report.json").read_text(encoding="utf-8"))
            _same(out, report["fingerprint"], fingerprint)
            shutil.rmtree(out / "work", ignore_errors=True)
            return RunResult(out, report["sha256"], report)
        _begin(recipe, out, fingerprint, min(_CHUNK, memory_bytes // processes // _SHARE), memory_bytes // 2)
        _all_stages(out, processes, executor, say)
        report = _finish(out, fingerprint, say)
        return RunResult(out, report["sha256"], report)


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    with (out / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another run is writing into {out}; wait for it, or use another folder") from None
        yield


def _same(out: Path, theirs: str, ours: str) -> None:
    if theirs != ours:
        raise ValueError(
            f"{out} contains the output of another recipe or of other input; use another folder, or delete this one"
        )


def _begin(recipe: Recipe, out: Path, fingerprint: str, chunk_bytes: int, memory_bytes: int) -> None:
    state = out / "run.json"
    if state.is_file():
        _same(out, json.loads(state.read_text(encoding="utf-8"))["fingerprint"], fingerprint)
    elif others := [path.name for path in out.iterdir() if path.name != ".lock"]:
        raise ValueError(f"{out} is not empty (it contains {others[0]}); use a new folder")
    else:
        value = {
            "fingerprint": fingerprint,
            "recipe": recipe.model_dump(mode="json"),
            "files": [[str(path), kind, source] for path, kind, source in recipe.files()],
            "chunk_bytes": chunk_bytes,
            "memory_bytes": memory_bytes,
        }
        tasks.save_json(state, value)
    for part in out.rglob("*.part"):
        part.unlink()


def _all_stages(out: Path, processes: int, executor: str, say: Say) -> None:
    tasks.work_plan.cache_clear()
    plan = tasks.work_plan(str(out))
    folder, last = str(out), len(plan.stages)
    with _pool(processes, executor) as submit:
        for stage in range(last + 1):
            plan.stage_folder(stage).mkdir(parents=True, exist_ok=True)
            done = plan.stage_folder(stage) / "done"
            if done.is_file():
                continue
            work: list[Task] = []
            if stage == 0:
                work = [(tasks.read, (folder, n), plan.stats_path(0, f"{n:06d}")) for n in range(len(plan.files))]
            else:
                work = [(tasks.process, (folder, stage, n), plan.stats_path(stage, n)) for n in plan.chunks(stage)]
            _each(work, submit, say, f"stage {stage} of {last}")
            if 0 < stage < last:
                joining = (tasks.join, (folder, stage), plan.stats_path(stage, "join"))
                _each([joining], submit, say, f"stage {stage} of {last}, join")
            done.touch()
            if stage > 0:  # the chunks of the previous stage are no longer needed, but their counts are
                for path in plan.stage_folder(stage - 1).iterdir():
                    if path.suffix in (".zst", ".npy"):
                        path.unlink()


def _each(work: Sequence[Task], submit: Callable[[Sequence[Task]], Iterator[str]], say: Say, what: str) -> None:
    missing = [task for task in work if not task[2].is_file()]
    for count, _ in enumerate(submit(missing), len(work) - len(missing) + 1):
        say(f"{what}: {count}/{len(work)}")


@contextmanager
def _pool(processes: int, executor: str) -> Iterator[Callable[[Sequence[Task]], Iterator[str]]]:
    """A function that runs tasks: in this process, in several, or on a Ray cluster whose machines share the folder."""
    if executor == "ray":
        ray = needed("ray", "ray")
        # A running cluster has its own number of processors, and raises an error for any other.
        cluster = env.ray_address()
        place = {"address": cluster} if cluster else {"address": "local", "num_cpus": processes, "include_dashboard": False}
        ray.init(**place, log_to_driver=False, ignore_reinit_error=True)
        try:
            yield lambda work: _on_ray(ray, work)
        finally:
            ray.shutdown()
    elif processes == 1:
        yield lambda work: (call(*arguments) for call, arguments, _ in work)
    else:
        with ProcessPoolExecutor(processes, multiprocessing.get_context("forkserver")) as pool:
            yield lambda work: _on_pool(pool, work)


def _on_pool(pool: ProcessPoolExecutor, work: Sequence[Task]) -> Iterator[str]:
    futures = {pool.submit(call, *arguments): arguments for call, arguments, _ in work}
    try:
        for future in as_completed(futures):
            yield future.result()
    except BrokenProcessPool:
        raise OSError(
            "a worker process died, perhaps because memory ran out; finished work is kept, so run again with fewer --processes"
        ) from None
    finally:
        for future in futures:
            future.cancel()


def _on_ray(ray: Any, work: Sequence[Task]) -> Iterator[str]:
    waiting = [ray.remote(call).remote(*arguments) for call, arguments, _ in work]
    while waiting:
        ready, waiting = ray.wait(waiting)
        yield from ray.get(ready)


def _finish(out: Path, fingerprint: str, say: Say) -> dict[str, Any]:
    plan = tasks.work_plan(str(out))
    last = len(plan.stages)
    documents = out / "documents"
    shutil.rmtree(documents, ignore_errors=True)
    documents.mkdir()
    names, digest = plan.chunks(last), hashlib.sha256()
    say("writing documents")
    pa = needed("pyarrow", "data")
    number = size = 0
    for name in names:
        chunk = str(plan.stage_folder(last) / f"{name}.zst")
        with (documents / f"{number:05d}.jsonl").open("ab") as file, pa.CompressedInputStream(chunk, "zstd") as stream:
            while data := stream.read(1 << 20):
                digest.update(data)
                size += file.write(data)
        if size >= _FILE_BYTES:
            number, size = number + 1, 0
    report = {"fingerprint": fingerprint, "sha256": digest.hexdigest(), "recipe": plan.recipe.model_dump(mode="json")}
    report |= _counts(plan, names)
    if plan.recipe.tokens:
        say("writing token shards")
        report["tokens"] = _shards(plan, names)
    tasks.save_json(out / "report.json", report)
    shutil.rmtree(out / "work")
    (out / "run.json").unlink()
    return report


def _counts(plan: tasks.Plan, names: Sequence[str]) -> dict[str, Any]:
    """The sums of the counts of all tasks: a row for each step, in order."""
    reading = [json.loads(plan.stats_path(0, f"{n:06d}").read_text()) for n in range(len(plan.files))]
    steps = [merged([part["steps"][0] for part in reading])]
    damage: dict[str, int] = {}
    for part in reading:
        for reason, count in part["damage"].items():
            damage[reason] = damage.get(reason, 0) + count
    steps[0] |= {"damage": damage, "file_bytes": sum(part["file_bytes"] for part in reading), "files": len(reading)}
    for stage in range(1, len(plan.stages) + 1):
        parts = [json.loads(plan.stats_path(stage, name).read_text()) for name in names]
        rows = [merged([part["steps"][i] for part in parts]) for i in range(len(parts[0]["steps"]))] if parts else []
        if stage > 1 and rows:
            joined = json.loads(plan.stats_path(stage - 1, "join").read_text())
            before = [json.loads(plan.stats_path(stage - 1, name).read_text()) for name in names]
            rows[0]["facts"] = joined["facts"]
            rows[0]["excerpts"] = {key: text for part in parts for key, text in part["excerpts"].items()}
            rows[0]["seconds"] += joined["seconds"] + sum(part["index_seconds"] for part in before)
        steps += rows
    return {"steps": steps}


def _shards(plan: tasks.Plan, names: Sequence[str]) -> dict[str, Any]:
    """Write token shards from all chunks: each source as often as its weight requires, in the shuffled order of documents."""
    spec = plan.recipe.tokens
    assert spec is not None
    folder = plan.stage_folder(len(plan.stages))
    tokens = [np.load(folder / f"{name}.tokens.npy", mmap_mode="r") for name in names]
    ends = [np.load(folder / f"{name}.ends.npy") for name in names]
    rows: list[tuple[int, int, int, int]] = []  # round, key, chunk, document
    for chunk, name in enumerate(names):
        for at, (key, source) in enumerate(np.load(folder / f"{name}.keys.npy").tolist()):
            weight = plan.recipe.input[source].weight
            # For the fractional part of a weight, the documents with the lowest keys (uniform in 64 bits) are taken once more.
            times = int(weight) + (key < (weight % 1) * 2**64)
            rows += [(again, key, chunk, at) for again in range(times)]
    rows.sort()

    def ordered() -> Iterator[np.ndarray]:
        for _, _, chunk, at in rows:
            yield tokens[chunk][ends[chunk][at - 1] if at else 0 : ends[chunk][at]]

    vocabulary = tasks._tokenizer(spec.tokenizer).get_vocab_size(with_added_tokens=True)
    end = tasks.end_of_text(plan.recipe)
    about = {
        "tokenizer": {
            "name": Path(spec.tokenizer).parent.name,
            "sha256": hashlib.sha256(Path(spec.tokenizer).read_bytes()).hexdigest(),
            "vocab": vocabulary,
            "end_of_text": end,
        },
        "order_seed": plan.recipe.seed,
    }
    dtype = "uint16" if vocabulary <= 1 << 16 else "uint32"
    return write(plan.folder / "tokens", ordered(), dtype, spec.shard_tokens, about)
