"""Finding a model's folder, and filling a model from its safetensors.

Names, shapes and types are compared from the files' headers before anything is allocated; then one tensor after the other goes
from the mapped file straight to its place on the device, converted on the way. Separate projections land in the rows of their
merged parameter.

Refuses: pickled weights (*.bin, *.pt, *.pth), and code: nothing in a model folder is ever run.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from tilewright.models.config import ModelError

__all__ = ["Checkpoint", "Progress", "check", "fill", "fill_random", "read_json", "resolve"]

Progress = Callable[[int, int], None]
"""Called with (bytes loaded, bytes in all) after every tensor."""

_EMBEDDED = Path(__file__).parent.parent / "assets"
_EMBEDDED_MODELS = ("bookworm",)
_HUB_WANTED = ["*.json", "*.safetensors", "*.jinja"]
_HUB_UNWANTED = ["*/*", "consolidated*"]  # other formats' folders, and the second copy of the weights in Mistral's repositories
_PICKLED = ("*.bin", "*.pt", "*.pth")
_FLOATS = ("BF16", "F16", "F32", "F64")

# What a parameter of `models.decoder` is called in a Hugging Face checkpoint; merged ones in the order of their rows.
_OUTER_NAMES = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_BLOCK_NAMES = {
    "attn_norm.weight": ("input_layernorm.weight",),
    "attn.qkv.weight": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "attn.qkv.bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    "attn.q_norm": ("self_attn.q_norm.weight",),
    "attn.k_norm": ("self_attn.k_norm.weight",),
    "attn.out.weight": ("self_attn.o_proj.weight",),
    "attn.out.bias": ("self_attn.o_proj.bias",),
    "ffn_norm.weight": ("post_attention_layernorm.weight",),
    "ffn.gate_up.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "ffn.gate_up.bias": ("mlp.gate_proj.bias", "mlp.up_proj.bias"),
    "ffn.down.weight": ("mlp.down_proj.weight",),
    "ffn.down.bias": ("mlp.down_proj.bias",),
}
_EMBED, _HEAD = _OUTER_NAMES["embed.weight"], _OUTER_NAMES["head.weight"]


def resolve(name_or_path: str | Path) -> Path:
    """The folder of a model: the embedded one by name, a local folder, or a name on the Hugging Face hub (downloaded, cached).

    Raises:
        ModelError: there is no such folder, or the hub does not give it (unknown, private, or no network).
    """
    name = str(name_or_path)
    if name in _EMBEDDED_MODELS:
        folder = _EMBEDDED / name
        if not folder.is_dir():
            raise ModelError(f"the embedded model {name!r} is not in this installation: no folder {folder}")
        return folder
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ModelError(f"{name} is a file; give the folder with config.json and the *.safetensors in it")
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=_HUB_WANTED, ignore_patterns=_HUB_UNWANTED))
    except HFValidationError as error:
        raise ModelError(f"no folder {name}, and it is not a hub name (like Qwen/Qwen3-0.6B)") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise ModelError(
            f"no folder {name}, it is not in the local hub cache, and the hub cannot be reached; "
            f"connect, or give the path of a downloaded folder"
        ) from error
    except HfHubHTTPError as error:
        raise ModelError(f"no folder {name}, and the hub does not give it: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ModelError when the file is missing or broken."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path} is missing; a model folder has config.json and *.safetensors") from error
    except ValueError as error:
        raise ModelError(f"{path} is not JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


class Checkpoint:
    """The safetensors of a folder: one file, or the shards that an index lists.

    shapes: tensor name -> shape, from the headers.

    Raises:
        ModelError: files are missing, corrupt, or pickled.
    """

    def __init__(self, folder: Path):
        self._files: dict[str, Any] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path in _weight_files(folder):
            try:
                file = safe_open(path, framework="pt", device="cpu")
            except SafetensorError as error:
                raise ModelError(f"{path} is not a whole safetensors file ({error}); download it again") from error
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                header = file.get_slice(name)
                if header.get_dtype() not in _FLOATS:
                    raise ModelError(f"{path}: {name} is {header.get_dtype()}; supported: {', '.join(_FLOATS)}, not quantised")
                self._files[name] = file
                self.shapes[name] = tuple(header.get_shape())

    def read(self, name: str) -> Tensor:
        """The tensor, on the CPU, backed by the mapped file."""
        return self._files[name].get_tensor(name)


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
            raise ModelError(f"{index} must have a weight_map, tensor name -> file name; download it again")
        paths = [folder / name for name in sorted(set(shards.values()))]
        if missing := [path.name for path in paths if not path.is_file()]:
            raise ModelError(f"{folder} lacks {', '.join(missing)}, which {index.name} lists; finish the download")
        return paths
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    if pickled := sorted(path.name for pattern in _PICKLED for path in folder.glob(pattern)):
        raise ModelError(
            f"{folder} has only pickled weights ({', '.join(pickled)}), which can run code when read and are refused; "
            f"convert them to safetensors"
        )
    raise ModelError(f"{folder} lacks model.safetensors (or model.safetensors.index.json and its shards)")


def _targets(model: nn.Module) -> dict[str, Tensor]:
    """Hugging Face name -> the rows of a parameter that it fills. A parameter shared by two layers comes once."""
    targets: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if name in _OUTER_NAMES:
            targets[_OUTER_NAMES[name]] = parameter
            continue
        _, layer, inner = name.split(".", 2)
        parts = getattr(model.get_submodule(name.rpartition(".")[0]), "parts", parameter.shape[:1])
        for source, rows in zip(_BLOCK_NAMES[inner], parameter.split(parts), strict=True):
            targets[f"model.layers.{layer}.{source}"] = rows
    return targets


def _ignorable(name: str) -> bool:
    """Old checkpoints of Llama store the rotation's frequencies, which the config already gives."""
    return name.endswith(".rotary_emb.inv_freq")


def _sources(model: nn.Module, checkpoint: Checkpoint) -> dict[str, Tensor]:
    """`_targets`, where a tied embedding that was saved under the head's name is looked for there."""
    targets = _targets(model)
    if _HEAD not in targets and _EMBED not in checkpoint.shapes and _HEAD in checkpoint.shapes:
        targets[_HEAD] = targets.pop(_EMBED)
    return targets


def check(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Compare the checkpoint's names and shapes with the model's, which may be on "meta".

    Raises:
        ModelError: tensors are missing, unexpected or mis-shaped, or a tied head differs; the message lists them.
    """
    targets, shapes = _sources(model, checkpoint), checkpoint.shapes
    tied_twice = _HEAD in shapes and _HEAD not in targets
    extra = [name for name in shapes if name not in targets and not _ignorable(name) and not (tied_twice and name == _HEAD)]
    wrong = [f"{name}: missing" for name in targets if name not in shapes]
    wrong += [f"{name}: unexpected" for name in extra]
    wrong += [
        f"{name}: got {list(shapes[name])}, config.json wants {list(target.shape)}"
        for name, target in targets.items()
        if name in shapes and shapes[name] != target.shape
    ]
    if wrong:
        shown = "".join(f"\n  {line}" for line in wrong[:12])
        more = f"\n  and {len(wrong) - 12} more" if len(wrong) > 12 else ""
        raise ModelError(f"config.json and the weights contradict each other, in {len(wrong)} tensors:{shown}{more}")
    if tied_twice and not torch.equal(checkpoint.read(_HEAD), checkpoint.read(_EMBED)):
        raise ModelError(f"config.json ties the word embeddings (tie_word_embeddings), but {_HEAD} differs from {_EMBED}")


def fill(model: nn.Module, checkpoint: Checkpoint, progress: Progress | None = None) -> None:
    """Copy the tensors of a checkpoint that `check` accepted into the model, to the model's device and dtype."""
    sources = _sources(model, checkpoint)
    total, done = sum(target.nbytes for target in sources.values()), 0
    for name, target in sources.items():
        target.copy_(checkpoint.read(name))
        done += target.nbytes
        if progress:
            progress(done, total)


def fill_random(model: nn.Module, seed: int) -> None:
    """Draw weights on the model's device: matrices keep the variance of what they multiply, norms are 1, biases small."""
    generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
        elif name.endswith(".bias"):
            parameter.normal_(0.0, 0.02, generator=generator)
        else:
            parameter.fill_(1.0)
