"""Fills a model from a checkpoint, or with random numbers, one layer at a time.

Names, shapes and dtypes are checked from the files' headers before anything is allocated. Then tensors are copied one after the
other from the mapped file to their place on the device, and converted on the way; separate projections go to the rows of their
merged parameter, and quantised ones are combined to a merged quantised weight. A model is created on "meta" first, and each
parameter gets its memory when it is filled. With `convert`, a layer's float weight exists only until it is quantised.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tilewright.models.decoder import Decoder
from tilewright.models.errors import ModelError
from tilewright.models.forms import FLOATS, Experts, Form, MXExperts
from tilewright.models.layouts import Layout, Own, Wanted
from tilewright.models.names import Stored, ignored, outer, stored
from tilewright.models.quantization import Quantization
from tilewright.models.weights import Checkpoint
from tilewright.nn import ExpertLinear, Linear, Rope
from tilewright.nn.filling import empty_parameter
from tilewright.ops.weights import QuantizedWeight, stack_rows

__all__ = ["Convert", "Progress", "check", "fill", "fill_random", "part_names", "parts_of", "replace_by_empty_quantized"]

Progress = Callable[[int, int], None]
"""Called with (bytes loaded, bytes in all) after every tensor."""
Convert = Callable[[str, Linear | ExpertLinear], None]
"""Called with each linear layer, once it is filled; may replace its weight."""

_LAYERS = (Linear, ExpertLinear)
"""Whose weight may be codes."""
_ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2}


class _Source(NamedTuple):
    """Where a parameter comes from: one tensor, or several that lie above each other."""

    module: nn.Module
    parameter: nn.Parameter
    names: tuple[str, ...]
    form: Form
    parts: tuple[int, ...]
    """Rows of what the module merges."""
    layouts: tuple[Layout, ...]
    """One for each name; none where it is a float parameter."""

    @property
    def rows(self) -> tuple[int, ...]:
        """Of each name."""
        return self.form.rows(self.parts)

    def pieces(self, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
        """(name, view of the parameter that it fills)."""
        return zip(self.names, self.form.views(parameter, self.parts), strict=True)

    def wanted(self) -> dict[str, Wanted]:
        """Name in the checkpoint -> what must stand there."""
        rest = tuple(self.parameter.shape[1:])
        found: dict[str, Wanted] = {}
        if not self.layouts:
            for name, view in self.pieces(self.parameter):
                found |= self.form.tensors(name, view)
            return found
        for name, rows, layout in zip(self.names, self.rows, self.layouts, strict=True):
            layer = name.removesuffix(".weight")
            try:
                tensors = layout.tensors(rows, *rest)
            except ModelError as error:
                raise ModelError(f"{layer}: {error}") from error
            found |= {f"{layer}.{suffix}": wanted for suffix, wanted in tensors.items()}
        return found


def part_names(model: Decoder, parameter: str, parts: Sequence[int]) -> Stored:
    """Where a parameter of the model lies in a Hugging Face checkpoint, given the rows of what it merges."""
    experts = 0 if model.config.experts is None else model.config.experts.routing.experts
    return stored(model.config.architecture, parameter, len(parts), experts, model.config.num_attention_heads)


def _sources(model: Decoder, quantization: Quantization | None, checkpoint: Checkpoint | None = None) -> Iterator[_Source]:
    """Every parameter once, in the order of `named_parameters`.

    A tied embedding that was saved under the head's name is looked for there.
    """
    parameters = dict(model.named_parameters())
    embed, head = outer(model.config.architecture)
    under_head = (
        checkpoint is not None
        and "head.weight" not in parameters
        and embed not in checkpoint.shapes
        and head in checkpoint.shapes
    )
    for path, parameter in parameters.items():
        module = model.get_submodule(path.rpartition(".")[0])
        parts = parts_of(module, parameter)
        names, form = part_names(model, path, parts)
        if under_head and path == "embed.weight":
            names = (head,)
        if isinstance(form, Experts) and checkpoint is not None and f"{names[0]}_blocks" in checkpoint.shapes:
            form = MXExperts(form.experts, form.projections)
        layouts: tuple[Layout, ...] = ()
        if quantization is not None and isinstance(module, _LAYERS) and path.endswith(".weight"):
            layouts = _layouts(quantization, names)
            if form.moves and not all(isinstance(layout, Own) for layout in layouts):
                raise ModelError(
                    f"{names[0]}: checkpoints of {model.config.architecture} that another library has quantised are "
                    "not supported; use the unquantised checkpoint, and quantise it while loading"
                )
        yield _Source(module, parameter, names, form, parts, layouts)


def parts_of(module: nn.Module, parameter: Tensor) -> tuple[int, ...]:
    """Rows of what a module's parameter merges; all of them where it merges nothing."""
    return tuple(getattr(module, "parts", parameter.shape[:1]))


def _layouts(quantization: Quantization, names: Sequence[str]) -> tuple[Layout, ...]:
    found = [quantization.layout_of(name.removesuffix(".weight")) for name in names]
    if len({None if layout is None else type(layout) for layout in found}) > 1:
        raise ModelError(
            f"quantization_config quantises only some of {', '.join(names)}, or in different ways, but they form one "
            "layer here and must be quantised alike; change its list of ignored layers and quantise again"
        )
    return tuple(layout for layout in found if layout is not None)


def _ignorable(architecture: str, name: str, second_token: str) -> bool:
    """Old checkpoints of Llama store the rotation's frequencies, which the config already gives."""
    return ignored(architecture, name) or bool(second_token and name.startswith(second_token))


def _second_token(model: Decoder, checkpoint: Checkpoint) -> str:
    """The prefix of the layer behind the last that predicts a second token (DeepSeek-V3), "" where there is none.

    It is known by its norm of an embedding; a layer too many is something else.
    """
    prefix = f"model.layers.{len(list(model.get_submodule('blocks').children()))}."
    return prefix if f"{prefix}enorm.weight" in checkpoint.shapes else ""


# ---- checks


def check(model: Decoder, checkpoint: Checkpoint, quantization: Quantization | None = None) -> None:
    """Compare the checkpoint's names, shapes and dtypes with the model's, which may be on "meta".

    Raises:
        ModelError: tensors are missing, unexpected, mis-shaped or of a wrong dtype (the message lists them), or a tied head
            differs.
    """
    sources = list(_sources(model, quantization, checkpoint))
    wanted = {name: one for source in sources for name, one in source.wanted().items()}
    shapes = checkpoint.shapes
    for name, one in wanted.items():
        if name in shapes and one.dtypes == FLOATS and checkpoint.dtypes[name] not in FLOATS:
            hint = "" if quantization else " (config.json has no quantization_config)"
            raise ModelError(
                f"{name} is {checkpoint.dtypes[name]}, but a tensor that is not quantised must be one of "
                f"{', '.join(FLOATS)}{hint}"
            )
    embed, head = outer(model.config.architecture)
    tied_twice = head in shapes and head not in wanted
    second_token = _second_token(model, checkpoint)
    wrong = [line for name, one in wanted.items() for line in _faults(name, one, checkpoint)]
    wrong += [
        f"{name}: unexpected"
        for name in shapes
        if name not in wanted
        and not (tied_twice and name == head)
        and not _ignorable(model.config.architecture, name, second_token)
        and not _no_bias(name, wanted, checkpoint)
    ]
    if wrong:
        shown = "".join(f"\n  {line}" for line in wrong[:12])
        more = f"\n  and {len(wrong) - 12} more" if len(wrong) > 12 else ""
        raise ModelError(f"config.json and the weights contradict each other in {len(wrong)} tensors:{shown}{more}")
    if tied_twice and not torch.equal(checkpoint.read(head), checkpoint.read(embed)):
        raise ModelError(f"config.json ties the word embeddings (tie_word_embeddings), but {head} differs from {embed}")


def _faults(name: str, wanted: Wanted, checkpoint: Checkpoint) -> Iterator[str]:
    if name not in checkpoint.shapes:
        if not wanted.optional:
            yield f"{name}: missing" + ("" if wanted.dtypes == FLOATS else ", of a quantised weight")
        return
    shape, dtype = checkpoint.shapes[name], checkpoint.dtypes[name]
    if shape not in wanted.shapes:
        yield f"{name}: shape is {list(shape)}, config.json requires {' or '.join(str(list(one)) for one in wanted.shapes)}"
    if dtype not in wanted.dtypes:
        yield f"{name}: dtype is {dtype}, config.json requires {' or '.join(wanted.dtypes)}"


def _no_bias(name: str, wanted: dict[str, Wanted], checkpoint: Checkpoint) -> bool:
    """Some writers of GPTQ give every layer a bias of zeros."""
    layer, _, last = name.rpartition(".")
    return last == "bias" and f"{layer}.qweight" in wanted and not bool(checkpoint.read(name).any())


# ---- filling


def fill(
    model: Decoder,
    checkpoint: Checkpoint,
    device: torch.device,
    *,
    quantization: Quantization | None = None,
    progress: Progress | None = None,
    convert: Convert | None = None,
) -> None:
    """Move a model from "meta" to the device, with the tensors of a checkpoint that `check` accepted, in the model's dtype."""
    sources = {id(source.parameter): source for source in _sources(model, quantization, checkpoint)}
    total = sum(_bytes(source, checkpoint) for source in sources.values())
    done = 0

    def read(parameter: nn.Parameter) -> nn.Parameter | QuantizedWeight:
        nonlocal done
        source = sources[id(parameter)]
        if source.layouts:
            made = _read_quantized(source, checkpoint, device)
        else:
            made = empty_parameter(*parameter.shape, device=device, dtype=parameter.dtype)
            for name, view in source.pieces(made):
                source.form.put(view, name, checkpoint.read)
                done += view.nbytes
                if progress:
                    progress(done, total)
        if source.layouts:
            done += _bytes(source, checkpoint)
            if progress:
                progress(done, total)
        return made

    _allocate(model, device, read, convert)


def _bytes(source: _Source, checkpoint: Checkpoint) -> int:
    if not source.layouts:
        return source.parameter.nbytes
    found = [name for name in source.wanted() if name in checkpoint.shapes]
    return sum(torch.Size(checkpoint.shapes[n]).numel() * _ITEM_BYTES.get(checkpoint.dtypes[n], 1) for n in found)


def _read_quantized(source: _Source, checkpoint: Checkpoint, device: torch.device) -> QuantizedWeight:
    parts = []
    for name, rows, layout in zip(source.names, source.rows, source.layouts, strict=True):
        layer, cols = name.removesuffix(".weight"), source.parameter.shape[1]
        names = {suffix: f"{layer}.{suffix}" for suffix in layout.tensors(rows, cols)}
        tensors = {suffix: checkpoint.read(full).to(device) for suffix, full in names.items() if full in checkpoint.shapes}
        try:
            parts.append(layout.assemble(tensors, rows, cols, source.parameter.dtype))
        except ValueError as error:
            raise ModelError(f"{layer}: {error}") from error
    return stack_rows(parts)


def fill_random(model: nn.Module, device: torch.device, seed: int, convert: Convert | None = None) -> None:
    """Move a model that is on "meta" to the device, with weights drawn there.

    Matrices keep the variance of what they multiply, norms are 1, biases small.
    """
    generator = torch.Generator(device).manual_seed(seed)
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def draw(parameter: nn.Parameter) -> nn.Parameter:
        made = empty_parameter(*parameter.shape, device=device, dtype=parameter.dtype)
        if made.dim() == 2:
            made.normal_(0.0, made.shape[1] ** -0.5, generator=generator)
        elif names[id(parameter)].endswith(".bias"):
            made.normal_(0.0, 0.02, generator=generator)
        else:
            made.fill_(1.0)
        return made

    _allocate(model, device, draw, convert)


def _allocate(
    model: nn.Module,
    device: torch.device,
    make: Callable[[nn.Parameter], nn.Parameter | QuantizedWeight],
    convert: Convert | None,
) -> None:
    """Replace every parameter, layer by layer, and compute the tables. A parameter that two layers share stays one."""
    # Only what is shared is held here: a weight that `convert` replaces must go.
    holders = Counter(id(one) for module in model.modules() for one in module.parameters(recurse=False))
    shared: dict[int, nn.Parameter] = {}
    for path, module in list(model.named_modules()):
        if isinstance(module, Rope):
            module.materialise(device)
        for name, old in list(module.named_parameters(recurse=False)):
            new = shared[id(old)] if id(old) in shared else make(old)
            if isinstance(new, QuantizedWeight):
                assert isinstance(module, _LAYERS)
                module.replace_weight(new)
            else:
                setattr(module, name, new)
                if holders[id(old)] > 1:
                    shared[id(old)] = new
        if convert is not None and isinstance(module, _LAYERS):
            convert(path, module)


def replace_by_empty_quantized(model: Decoder, quantization: Quantization, device: torch.device) -> None:
    """Give a model the quantised weights that its checkpoint would fill, uninitialised."""
    for source in list(_sources(model, quantization)):
        if not source.layouts:
            continue
        cols, parts = source.parameter.shape[1], []
        for rows, layout in zip(source.rows, source.layouts, strict=True):
            wanted = layout.tensors(rows, cols).items()
            tensors = {suffix: torch.empty(one.shapes[0], dtype=_TORCH[one.dtypes[0]], device=device) for suffix, one in wanted}
            parts.append(layout.assemble(tensors, rows, cols, source.parameter.dtype))
        assert isinstance(source.module, _LAYERS)
        source.module.replace_weight(stack_rows(parts))


_TORCH = {
    "F32": torch.float32, "I32": torch.int32, "I64": torch.int64, "I8": torch.int8, "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
