"""The tasks of a run: functions of (work folder, number or name of the unit) that read and write files, in any process.

A task writes its results under temporary names and then renames them; the file with its counts is the last one. If that file
exists, the task is done, so a killed run continues after it. Nothing here depends on the number of processes.
"""

import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np

from tilewright.data.compressed import Limits
from tilewright.data.document import Document, Removed, from_line, to_line
from tilewright.data.exact import Arrays, GlobalStep
from tilewright.data.hashing import order_key
from tilewright.data.read import documents
from tilewright.data.recipe import Recipe
from tilewright.data.stats import StepStats, size_of
from tilewright.data.steps import LocalStep, build, stages
from tilewright.extras import needed

__all__ = ["Plan", "join", "process", "read", "save_json", "work_plan"]


class Plan:
    """The work of a run, read from its folder: the recipe, sizes and input files."""

    def __init__(self, folder: Path) -> None:
        raw = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        self.folder = folder
        self.recipe = Recipe.model_validate(raw["recipe"])
        self.chunk_bytes: int = raw["chunk_bytes"]
        self.memory_bytes: int = raw["memory_bytes"]
        self.files: list[tuple[str, str, int]] = [tuple(row) for row in raw["files"]]
        self.stages = stages(self.recipe.step)

    def stage_folder(self, stage: int) -> Path:
        """The folder with a stage's chunks; stage 0 is reading."""
        return self.folder / "work" / f"stage-{stage}"

    def chunks(self, stage: int) -> list[str]:
        """The names of a finished stage's chunks, in the order of the input."""
        if stage == 0:
            counts = [json.loads(self.stats_path(0, f"{n:06d}").read_text())["chunks"] for n in range(len(self.files))]
            return [f"{file:06d}-{part:06d}" for file, count in enumerate(counts) for part in range(count)]
        return self.chunks(0)

    def stats_path(self, stage: int, name: str) -> Path:
        """The file whose existence shows that a task is done."""
        return self.stage_folder(stage) / f"{name}.json"


@lru_cache(4)
def work_plan(folder: str) -> Plan:
    """The plan of a folder, read once per process."""
    return Plan(Path(folder))


@lru_cache(64)
def _built(folder: str, stage: int) -> tuple[GlobalStep | None, tuple[tuple[str, LocalStep], ...], GlobalStep | None]:
    """(global step to apply, local steps, global step to index for) of a stage, built once per process."""
    cut = work_plan(folder).stages
    before, local = cut[stage - 1]
    after = cut[stage][0] if stage < len(cut) else None
    return (
        cast(GlobalStep, build(before)) if before else None,
        tuple((step["use"], cast(LocalStep, build(step))) for step in local),
        cast(GlobalStep, build(after)) if after else None,
    )


def save_json(path: Path, value: Any) -> None:
    """Write a value as JSON, atomically."""
    _replace(path, json.dumps(value, sort_keys=True, indent=1).encode())


def _replace(path: Path, data: bytes) -> None:
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_bytes(data)
    part.replace(path)


def _save_array(path: Path, value: np.ndarray) -> None:
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    with part.open("wb") as file:
        np.save(file, value)
    part.replace(path)


def _write_chunk(path: Path, rows: Sequence[Document]) -> None:
    pa = needed("pyarrow", "data")
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    with pa.CompressedOutputStream(str(part), "zstd") as stream:
        for row in rows:
            stream.write(to_line(row))
    part.replace(path)


def _read_chunk(path: Path) -> Iterator[Document]:
    pa = needed("pyarrow", "data")
    with pa.CompressedInputStream(str(path), "zstd") as stream:
        rest = b""
        while data := stream.read(1 << 20):
            *lines, rest = (rest + data).split(b"\n")
            yield from map(from_line, lines)


def read(folder: str, number: int) -> str:
    """Read input file `number` and write its documents as chunks of at most `chunk_bytes`."""
    plan = work_plan(folder)
    path, kind, source = plan.files[number]
    limits = Limits(record_bytes=min(Limits().record_bytes, plan.memory_bytes // 16))
    damage: Counter[str] = Counter()
    stats = StepStats("read")
    held: list[Document] = []
    size = chunks = 0

    def flush() -> None:
        nonlocal held, size, chunks
        _write_chunk(plan.stage_folder(0) / f"{number:06d}-{chunks:06d}.zst", held)
        held, size, chunks = [], 0, chunks + 1

    begun = time.perf_counter()
    field = plan.recipe.input[source].text_field
    for document in documents(Path(path), kind, limits, damage, text_field=field):
        if len(plan.recipe.input) > 1 or plan.recipe.input[source].name:
            document.metadata["source"] = plan.recipe.input[source].name or str(source)
        document.origin["input"] = source
        length = size_of(document)
        stats.note(document, length, document, 0.0)
        held.append(document)
        size += length
        if size >= plan.chunk_bytes:
            flush()
    if held:
        flush()
    stats.seconds = time.perf_counter() - begun
    bytes_in = Path(path).stat().st_size
    value = {"file": path, "file_bytes": bytes_in, "chunks": chunks, "damage": dict(damage), "steps": [stats.value()]}
    save_json(plan.stats_path(0, f"{number:06d}"), value)
    return path


def process(folder: str, stage: int, name: str) -> str:
    """Process one chunk in a stage: apply the result of the previous join, run the local steps, index it for the next join."""
    plan = work_plan(folder)
    before, local, after = _built(folder, stage)
    cut = plan.stages[stage - 1][0]
    all_stats = ([StepStats(cut["use"])] if cut else []) + [StepStats(step) for step, _ in local]
    found = _load_arrays(plan, stage - 1, name, "found") if before else {}
    shown = _shown(plan, stage - 1) if before else frozenset()
    excerpts: dict[str, str] = {}
    kept: list[Document] = []
    for row, document in enumerate(_read_chunk(plan.stage_folder(stage - 1) / f"{name}.zst")):
        answer: Document | Removed = document
        if document.id in shown:
            excerpts[document.id] = document.text[:400]
        calls = ([lambda d, row=row: before.apply(d, row, found)] if before else []) + [step for _, step in local]
        for stats, call in zip(all_stats, calls):
            bytes_in = size_of(document)
            begun = time.perf_counter()
            answer = call(document)
            stats.note(document, bytes_in, answer, time.perf_counter() - begun)
            if isinstance(answer, Removed):
                break
            document = answer
            document.steps.append({"step": stats.name, **document.notes})
            document.notes = {}
        if not isinstance(answer, Removed):
            kept.append(document)
    target = plan.stage_folder(stage)
    begun = time.perf_counter()
    if after is not None:
        for key, array in after.index(kept).items():
            _save_array(target / f"{name}.index.{key}.npy", array)
    seconds = time.perf_counter() - begun
    if stage == len(plan.stages) and plan.recipe.tokens:
        _tokenize(plan, name, kept)
    _write_chunk(target / f"{name}.zst", kept)
    sizes = {"documents": len(kept), "bytes": sum(len(document.text.encode()) for document in kept)}
    value = {**sizes, "index_seconds": seconds, "excerpts": excerpts, "steps": [stats.value() for stats in all_stats]}
    save_json(plan.stats_path(stage, name), value)
    return name


def _shown(plan: Plan, stage: int) -> frozenset[str]:
    """The ids of documents that the report shows for a join's largest clusters."""
    facts = json.loads(plan.stats_path(stage, "join").read_text(encoding="utf-8"))["facts"]
    return frozenset(member for members in facts.get("largest", {}).values() for member in members)


def _load_arrays(plan: Plan, stage: int, name: str, what: str) -> Arrays:
    prefix = f"{name}.{what}."
    paths = sorted(plan.stage_folder(stage).glob(f"{prefix}*.npy"))
    return {path.name.removeprefix(prefix).removesuffix(".npy"): np.load(path, mmap_mode="r") for path in paths}


def join(folder: str, stage: int) -> str:
    """Compare the indexes of all chunks of a stage and write the result for each chunk."""
    plan = work_plan(folder)
    step = cast(GlobalStep, _built(folder, stage)[2])
    names = plan.chunks(stage)
    begun = time.perf_counter()
    facts: dict[str, Any] = {}
    if names:
        found, facts = step.join([_load_arrays(plan, stage, name, "index") for name in names], plan.memory_bytes)
        for name, arrays in zip(names, found):
            for key, array in arrays.items():
                _save_array(plan.stage_folder(stage) / f"{name}.found.{key}.npy", array)
    save_json(plan.stats_path(stage, "join"), {"facts": facts, "seconds": time.perf_counter() - begun})
    return f"join of stage {stage}"


@lru_cache(2)
def _tokenizer(path: str) -> Any:
    return needed("tokenizers", "data").Tokenizer.from_file(path)


def end_of_text(recipe: Recipe) -> int | None:
    """The id of the token after each document; raises ValueError if the tokenizer does not have it."""
    assert recipe.tokens is not None
    if not recipe.tokens.end_of_text:
        return None
    number = _tokenizer(recipe.tokens.tokenizer).token_to_id(recipe.tokens.end_of_text)
    if number is None:
        raise ValueError(
            f"tokens: the tokenizer {recipe.tokens.tokenizer} has no token {recipe.tokens.end_of_text!r}, which "
            "end_of_text names"
        )
    return number


def _tokenize(plan: Plan, name: str, rows: Sequence[Document]) -> None:
    assert plan.recipe.tokens is not None
    end = end_of_text(plan.recipe)
    tokenizer = _tokenizer(plan.recipe.tokens.tokenizer)
    parts, ends, keys, total = [], [], [], 0
    for at in range(0, len(rows), 64):
        batch = rows[at : at + 64]
        for document, encoding in zip(batch, tokenizer.encode_batch([d.text for d in batch], add_special_tokens=False)):
            ids = np.array([*encoding.ids, *([] if end is None else [end])], np.uint32)
            parts.append(ids)
            total += len(ids)
            ends.append(total)
            keys.append((order_key(plan.recipe.seed, document.id), document.origin["input"]))
    target = plan.stage_folder(len(plan.stages))
    _save_array(target / f"{name}.tokens.npy", np.concatenate([*parts, np.zeros(0, np.uint32)]))
    _save_array(target / f"{name}.ends.npy", np.array(ends, np.int64))
    _save_array(target / f"{name}.keys.npy", np.array(keys, np.uint64).reshape(-1, 2))
