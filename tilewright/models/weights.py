"""Finding a model's folder, and reading its safetensors.

Refuses pickled weights (*.bin, *.pt, *.pth). No code in a model folder is ever run.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from tilewright.extras import advice
from tilewright.models.errors import ModelError
from tilewright.models.files import check_plain_file, read_json

__all__ = ["Checkpoint", "Renamed", "resolve"]

_EMBEDDED = Path(__file__).parent.parent / "assets"
_EMBEDDED_MODELS = ("bookworm",)
_HUB_WANTED = ["*.json", "*.safetensors", "*.jinja"]
_HUB_UNWANTED = ["*/*", "consolidated*"]  # other formats' folders, and the second copy of the weights in Mistral's repositories
MAX_SHARDS = 1024
"""Files of weights; each stays open while the model loads. The largest models in use have some 160."""
_PICKLED = ("*.bin", "*.pt", "*.pth")


def resolve(name_or_path: str | Path) -> Path:
    """The folder of a model: the embedded one by name, a local folder, or a name on the Hugging Face hub (downloaded, cached).

    Raises:
        ModelError: there is no such folder, or the hub does not give it (unknown, private, or no network).
    """
    name = str(name_or_path)
    if name in _EMBEDDED_MODELS:
        folder = _EMBEDDED / name
        if not folder.is_dir():
            raise ModelError(
                f"the model {name!r} is in tilewright's repository but not in its wheel: run `make serve` in a clone, "
                f"or name a model folder or a model of the Hugging Face hub"
            )
        return folder
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ModelError(f"{name} is a file; give the folder with config.json and the *.safetensors in it")
    return _from_hub(name)


def _from_hub(name: str) -> Path:
    """The folder of a model of the hub, downloaded if it is not in the cache."""
    try:
        import huggingface_hub
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled
    except ModuleNotFoundError:
        raise ModelError(
            f"there is no folder {name}, and {advice('a model of the Hugging Face hub', 'huggingface_hub')}"
        ) from None
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=_HUB_WANTED, ignore_patterns=_HUB_UNWANTED))
    except HFValidationError as error:
        raise ModelError(
            f"there is no folder {name}, and it is not the name of a model on the hub (like Qwen/Qwen3-0.6B)"
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise ModelError(
            f"there is no folder {name}, it is not in the local hub cache, and the hub cannot be reached; connect to "
            "the network, or give the path of a downloaded folder"
        ) from error
    except HfHubHTTPError as error:
        raise ModelError(f"there is no folder {name}, and it cannot be downloaded from the hub: {error}") from error


def _is_plain(name: str) -> bool:
    """Whether a path is the name of a file in the folder itself. A shard elsewhere could be any file of the machine."""
    return name == Path(name).name and name not in ("", ".", "..") and "\\" not in name and "\0" not in name


class Checkpoint:
    """The safetensors of a folder: one file, or the shards that an index lists.

    shapes, dtypes: tensor name -> shape, and dtype as safetensors call it, from the headers.

    Raises:
        ModelError: files are missing, corrupt, or pickled.
    """

    def __init__(self, folder: Path):
        self._files: dict[str, Any] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        for path in _weight_files(folder):
            try:
                self._open(path)
            except SafetensorError as error:
                raise ModelError(f"{path} is not a complete safetensors file ({error}); download it again") from error
            except OSError as error:
                raise ModelError(f"{path} cannot be read ({error}); check its permissions") from error

    def _open(self, path: Path) -> None:
        file = safe_open(path, framework="pt", device="cpu")
        for name in file.keys():  # noqa: SIM118 (not a mapping)
            if name in self._files:
                raise ModelError(
                    f"{path} has the tensor {name[:200]!r}, which is also in another file; download the model again"
                )
            header = file.get_slice(name)
            self._files[name] = file
            self.shapes[name] = tuple(header.get_shape())
            self.dtypes[name] = header.get_dtype()

    def read(self, name: str) -> Tensor:
        """The tensor, on the CPU, backed by the mapped file."""
        return self._files[name].get_tensor(name)


class Renamed(Checkpoint):
    """A checkpoint whose tensors have other names: new -> old."""

    def __init__(self, source: Checkpoint, names: Mapping[str, str]):
        self._source, self._names = source, dict(names)
        self.shapes = {new: source.shapes[old] for new, old in names.items()}
        self.dtypes = {new: source.dtypes[old] for new, old in names.items()}

    def read(self, name: str) -> Tensor:
        """The tensor."""
        return self._source.read(self._names[name])


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
            raise ModelError(f"{index} must have a weight_map from tensor names to file names; download it again")
        names = sorted(set(shards.values()))
        if outside := [name for name in names if not _is_plain(name)]:
            raise ModelError(
                f"{index} names {outside[0][:200]!r} as a file of weights, wanted the name of a file in the same folder"
            )
        if not names or len(names) > MAX_SHARDS:
            raise ModelError(f"{index} lists {len(names)} files of weights, wanted 1 to {MAX_SHARDS}; download it again")
        paths = [folder / name for name in names]
        if missing := [path.name for path in paths if not path.exists()]:
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            raise ModelError(
                f"{folder} does not have {', '.join(missing[:5])}{more}, which {index.name} lists; complete the download"
            )
        for path in paths:
            check_plain_file(path)
        return paths
    single = folder / "model.safetensors"
    if single.exists():
        check_plain_file(single)
        return [single]
    if pickled := sorted(path.name for pattern in _PICKLED for path in folder.glob(pattern)):
        raise ModelError(
            f"{folder} has only pickled weights ({', '.join(pickled)}), which are not read because reading them can "
            "run code; convert them to safetensors"
        )
    raise ModelError(f"{folder} has no model.safetensors (and no model.safetensors.index.json with its shards)")
