"""The groups of `tilewright bench all`: each is one command with one result file and an expected duration.

Durations are estimates for an H100 or H200 with 16 CPU cores and empty caches of compiled kernels: the GPU's part follows from
earlier results; starting a process and compiling are rounded up. They are used only for the progress display, and to decide
what fits into the rest of a time budget. Groups that compare whole models (`--only compare`) are not part of "all", because
they take as long again.
"""

from dataclasses import dataclass

from tilewright.bench.dims import nearest

__all__ = ["GROUPS", "Group", "chosen"]


@dataclass(frozen=True, kw_only=True)
class Group:
    """One result file, and the command that writes it."""

    name: str
    """Name of the file, without its suffix."""
    words: tuple[str, ...]
    """The words of the command after `tilewright`, without its options for the file."""
    rows: int
    """The number of rows of the complete file."""
    start_s: float
    """Seconds until the first row can be measured: imports, kernels, weights."""
    row_s: float
    extra: bool = False
    """Whether the group is measured only if it is named."""

    def seconds(self, rows: int) -> float:
        """The expected seconds for so many of its rows."""
        return self.start_s + rows * self.row_s if rows else 0.0

    @property
    def first_s(self) -> float:
        """The expected seconds until one row is written."""
        return self.seconds(1)


def _engine(name: str, words: str, rows: int, start_s: float, row_s: float) -> Group:
    return Group(name=f"engine-{name}", words=("bench", "engine", *words.split()), rows=rows, start_s=start_s, row_s=row_s)


def _op(name: str, words: str, rows: int, row_s: float, start_s: float = 8) -> Group:
    return Group(name=name, words=("bench", *words.split()), rows=rows, start_s=start_s, row_s=row_s)


def _compare(model: str, ours: str, baseline: str, claim: float, seconds: float, budget: int, *more: str) -> Group:
    """A comparison of whole programs in one process, which writes its file at the end; `seconds`: its time on an H100."""
    of = baseline.partition(":")[0] if ours.endswith("fp16") else ours.partition(":")[2]
    words = ("--model", model, "--ours", ours, "--baseline", baseline, "--claim", str(claim), *more, "--budget", str(budget))
    name = f"compare-{model.replace('_', '-').replace('@', '-')}-{of}"
    return Group(name=name, words=("compare", *words), rows=1, start_s=0, row_s=seconds, extra=True)


_EPILOGUES = ";".join((
    *(f"M={m},N=28672,K=4096,activation=silu_mul" for m in (256, 2048)),
    *(f"M={m},N=28672,K=4096,activation=gelu,bias=true" for m in (256, 2048)),
    "M=256,N=4096,K=4096,residual=true",
    "M=4096,N=4096,K=14336,residual=true",
))  # fmt: skip
_FP16 = "optimize:fp16"
_WHOLE = (
    *(("bert_base", 67, 12), ("resnet50", 100, 20), ("resnet50@32", 60, 30), ("tabular_mlp", 30, 12)),
    *(("vit_b16", 100, 12), ("vit_b16@32", 125, 30)),
)
_LAYERS = (
    *(("bert_base", 166, 130), ("resnet50", 126, 120), ("resnet50@32", 96, 95), ("tabular_mlp", 27, 25)),
    *(("vit_b16", 100, 100), ("vit_b16@32", 150, 150)),
)

GROUPS: tuple[Group, ...] = (
    _engine("qwen3-0.6b", "qwen3-0.6b -w W1 -w W2 -w B1 -w R2000 --runs 2", 8, 25, 9),
    _engine("qwen3-8b", "qwen3-8b -w W1 -w W2 -w B1 --runs 1", 3, 25, 20),
    _engine("llama-8b", "llama-8b -w B1 -w B64 -w P4096 --runs 2", 6, 30, 2),
    _engine("llama-8b-int8", "llama-8b -w B1 -w B64 -w P4096 --runs 2 --quantize int8", 6, 35, 1.5),
    _op("ops", "ops", 52, 1.0, 12),
    _op("layers", "layers int8 fp8 int4 int8-weight mxfp8 fp8-block", 792, 0.24, 12),
    _op("layers-settled", "layers int8 int4 mxfp8 --settle 0.5 --rows 4096", 36, 3.7, 12),
    _op("attention", "attention", 58, 1.0, 10),
    _op("attention-backward", "attention_backward", 58, 1.5, 10),
    _op("attention-8bit-turns", "attention-8bit fp8", 12, 1.6, 10),
    _op("attention-8bit", "attention-8bit fp8 --settle 0.5", 12, 5.0, 10),
    _op("paged-attention", "paged_attention", 21, 1.6),
    _op("mla-attention", "mla_attention", 12, 1.4),
    _op("linear-decode", "linear --set decode --against vendor", 36, 1.0),
    _op("linear-awkward", "linear --set awkward --aligned", 40, 1.4),
    _op("linear-sm90-projections", "linear --set projections --prefer sm90 --against vendor", 96, 0.8),
    _op("linear-sm90-squares", "linear --set squares --prefer sm90 --against vendor", 6, 1.0),
    Group(
        name="epilogue", words=("bench", "linear", "--shapes", _EPILOGUES, "--against", "inductor"), rows=6, start_s=10, row_s=7
    ),
    _op("conv", "conv", 32, 1.9),
    _op("conv-transpose", "conv_transpose", 7, 1.7),
    _op("permute", "permute", 8, 0.9),
    _op("layer-norm-backward", "layer_norm_backward", 14, 1.2),
    *(_compare(model, _FP16, "compile:fp16", 1.15, s, budget, "--whole") for model, s, budget in _WHOLE),
    *(_compare(model, _FP16, "eager", 1.5, s, budget) for model, s, budget in _LAYERS),
    _compare("bert_base", "optimize:int8", "optimize:fp16", 1.0, 67, 8, "--whole"),
)
"""In the order in which they are measured."""


def chosen(only: list[str] | None) -> list[Group]:
    """The groups with these names. A name that no group has stands for all groups whose name begins with it and a hyphen.

    None: all groups that are not extra. Raises ValueError for a name that stands for no group.
    """
    if not only:
        return [group for group in GROUPS if not group.extra]
    found: set[str] = set()
    names = [group.name for group in GROUPS]
    for name in only:
        some = {name} & set(names) or {other for other in names if other.startswith(f"{name}-")}
        if not some:
            raise ValueError(f"there is no group {name!r} for --only: {nearest(name, names)}")
        found |= some
    return [group for group in GROUPS if group.name in found]
