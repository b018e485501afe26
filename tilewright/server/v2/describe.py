"""Answers about models in the protocol's formats: metadata, configuration, statistics, the repository's index."""

from typing import Any

from tilewright.host.host import Host, Model
from tilewright.host.tensors import DATATYPES, TensorSpec

__all__ = ["EXTENSIONS", "PLATFORM", "config_of", "extensions_of", "index_of", "metadata_of", "stats_of"]

EXTENSIONS = (
    "binary_tensor_data",
    "model_configuration",
    "model_repository",
    "parameters",
    "schedule_policy",
    "sequence",
    "statistics",
)
PLATFORM = "tilewright_torch"


def extensions_of(*, shared_memory: bool) -> tuple[str, ...]:
    """The protocol extensions that a server supports."""
    return (*EXTENSIONS, "system_shared_memory") if shared_memory else EXTENSIONS


def metadata_of(model: Model, version: int | None) -> dict[str, Any]:
    """The metadata of a model, in the protocol's format."""
    numbers = [version] if version is not None else sorted(model.versions) or [1]
    return {
        "name": model.name,
        "versions": [str(number) for number in numbers],
        "platform": "ensemble" if model.pipeline else PLATFORM,
        "inputs": [spec.json() for spec in model.signature.inputs],
        "outputs": [spec.json() for spec in model.signature.outputs],
    }


def config_of(model: Model) -> dict[str, Any]:
    """The configuration in the format of the model configuration extension, only with the fields that apply to this server."""
    config, batched = model.config, model.signature.batched
    most = min((version.max_rows for version in model.versions.values()), default=config.max_batch)

    def tensor(spec: TensorSpec) -> dict[str, Any]:
        dims = spec.shape[1:] if batched else spec.shape
        return {"name": spec.name, "data_type": f"TYPE_{DATATYPES[spec.datatype].config}", "dims": list(dims)}

    found: dict[str, Any] = {
        "name": model.name,
        "platform": "ensemble" if model.pipeline else PLATFORM,
        "backend": "tilewright",
        "max_batch_size": most if batched else 0,
        "input": [tensor(spec) for spec in model.signature.inputs],
        "output": [tensor(spec) for spec in model.signature.outputs],
    }
    if batched and not config.state and not model.pipeline:
        delay_us = round(config.max_delay_ms * 1e3)
        found["dynamic_batching"] = {"preferred_batch_size": list(config.preferred), "max_queue_delay_microseconds": delay_us}
    if config.state:
        found["sequence_batching"] = {"max_sequence_idle_microseconds": round(config.sequence_idle_s * 1e6)}
    if model.pipeline:
        found["ensemble_scheduling"] = {
            "step": [
                {
                    "model_name": step.model,
                    "model_version": -1,
                    "input_map": dict(step.inputs),
                    "output_map": dict(step.outputs),
                }
                for step in config.steps
            ]
        }
    return found


def stats_of(model: Model, version: int | None) -> list[dict[str, Any]]:
    """The statistics in the format of the statistics extension, for one version or (None) for all."""
    if model.pipeline:
        return [model.stats.json(model.name, 1)]
    numbers = sorted(model.versions) if version is None else [version]
    return [model.versions[number].stats.json(model.name, number) for number in numbers]


def index_of(host: Host, *, ready: bool) -> list[dict[str, str]]:
    """The index of the repository extension: models that are loaded or could be. With `ready`, only those that are ready."""
    found = list[dict[str, str]]()
    for model in host.models.values():
        for number in sorted(model.versions) or [1]:
            there = model.ready if model.pipeline else model.versions[number].ready
            reason = host.failed.get(model.name, "" if there else "it is being replaced")
            state = "READY" if there else "UNAVAILABLE"
            found.append({"name": model.name, "version": str(number), "state": state, "reason": reason})
    names = set(host.sources) | set(host.repository.names() if host.repository is not None else ())
    for name in sorted(names - set(host.models)):
        awaited = host.awaited(name)
        state, reason = ("LOADING", awaited) if awaited else ("UNAVAILABLE", host.failed.get(name, "not loaded"))
        found.append({"name": name, "version": "", "state": state, "reason": reason})
    return [one for one in found if one["state"] == "READY" or not ready]
