"""LoRA adapters over HTTP: which there are, and loading and unloading them while the server runs.

The engine knows which adapters there are; a request names one as its model. Loading is for whom the operator lets: only with
`--adapter-dir`, and only from folders below that one, wherever symbolic links lead. Names and paths are bounded; whatever is
wrong with a folder is one sentence to the client that asked for it, and nobody else notices.
"""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from tilewright.engine.adapter_names import MAX_NAME
from tilewright.server.config import ServerConfig
from tilewright.server.errors import ApiError, bad_request

__all__ = ["LoadBody", "UnloadBody", "check_allowed", "folder_below"]

MAX_PATH = 4096
"""Characters of a path that a client may name; Linux takes no more."""


class UnloadBody(BaseModel):
    """Fields of /v1/unload_lora_adapter."""

    model_config = ConfigDict(strict=True)
    lora_name: str = Field(min_length=1, max_length=MAX_NAME)


class LoadBody(UnloadBody):
    """Fields of /v1/load_lora_adapter."""

    lora_path: str = Field(min_length=1, max_length=MAX_PATH)
    """A folder, absolute or from `adapter_dir` on."""


def folder_below(path: str, config: ServerConfig) -> Path:
    """The folder that a client names.

    Raises:
        ApiError: 403, the operator allows none; 400, it is not below the operator's folder, or there is none.
    """
    check_allowed(config)
    assert config.adapter_dir is not None
    home = Path(config.adapter_dir).resolve()
    try:
        found = (home / path).resolve()
    except (OSError, RuntimeError, ValueError):
        raise bad_request("lora_path is no path of this system", "lora_path") from None
    # What lies outside is not told apart from what is not there.
    if home not in found.parents or not found.is_dir():
        raise bad_request(f"lora_path is {path[:200]!r}, wanted a folder below the server's folder for adapters", "lora_path")
    return found


def check_allowed(config: ServerConfig) -> None:
    """Raise ApiError (403) unless the operator lets clients load adapters."""
    if config.adapter_dir is None:
        raise ApiError(
            403, "this server loads no adapters on request: start it with --adapter-dir FOLDER", code="adapters_not_allowed"
        )
