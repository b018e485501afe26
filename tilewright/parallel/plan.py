"""A parallel plan: describes how a run is distributed over ranks. Does not import torch.

    dp    number of replicas; the micro-batches of an update are divided among them
    zero  what is divided among the replicas instead of stored by each: 1 the optimizer state, 2 also the sums of gradients,
          3 also the weights
    tp    number of parts into which the heads and the feed-forward width of a layer are divided
    sp    also divide the tokens, for the modules that tp does not divide (the norms)
    pp    number of ranks among which the layers are divided; `schedule`: order of the passes; `virtual`: parts per rank
    cp    number of parts into which the tokens of a micro-batch are divided; in attention, the heads are divided instead
    ring  with cp: for attention, keys and values are sent from rank to rank, and the heads are not divided
    ep    number of dp replicas that share one set of experts: each holds some of the experts of every layer

The number of ranks is pp * dp * cp * tp. Neighbouring ranks differ in their place along tp, which is the innermost dimension.
`slices` and `chunks` define what is computed, not on which rank: they are the numbers of parts into which layers and
micro-batches are divided for their sums. Their defaults are tp and cp. Runs with the same `slices` and `chunks` give bitwise
the same results under every plan, if sums follow the order of the tree (reduce.py).
"""

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

__all__ = ["SCHEDULES", "Plan", "Shape"]

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero-bubble")
_ONE_PART = ("1f1b", "gpipe")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The quantities that a plan must divide.

    heads, kv_heads, inner: attention heads, key/value heads, and feed-forward width of a layer.
    tokens: number per micro-batch.
    micro_batches: number per update, over all replicas.
    tree: whether sums follow the order of the tree.
    whole: name of an optimizer that needs whole parameters, else None.
    ragged: whether micro-batches may have fewer tokens than `tokens`.
    experts: number per mixture layer; 0 if the model has none.
    """

    layers: int
    heads: int
    kv_heads: int
    inner: int
    tokens: int
    micro_batches: int
    tree: bool
    whole: str | None = None
    ragged: bool = False
    experts: int = 0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How to distribute a run; the module's documentation explains the fields.

    Raises:
        ValueError: a value is invalid for every model.
    """

    dp: int = 1
    zero: int = 0
    tp: int = 1
    sp: bool = False
    pp: int = 1
    schedule: str = "1f1b"
    virtual: int = 1
    cp: int = 1
    ep: int = 1
    slices: int = 0
    chunks: int = 0
    ring: bool = False

    def __post_init__(self) -> None:
        for one in fields(self):
            value, kind = getattr(self, one.name), one.type
            if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):  # pyright: ignore[reportArgumentType]
                raise ValueError(f"parallel: {one.name} is {value!r}, wanted {getattr(kind, '__name__', kind)}")
        for name in ("dp", "tp", "pp", "virtual", "cp", "ep"):
            if getattr(self, name) < 1:
                raise ValueError(f"parallel: {name} is {getattr(self, name)}, wanted 1 or more")
        if self.zero not in (0, 1, 2, 3):
            raise ValueError(f"parallel: zero is {self.zero}, wanted 0, 1, 2 or 3")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"parallel: schedule is {self.schedule!r}, wanted one of {', '.join(SCHEDULES)}")
        if self.virtual > 1 and self.schedule in _ONE_PART:
            raise ValueError(
                f"parallel: virtual is {self.virtual}, but schedule {self.schedule} has one part per rank; leave virtual "
                "out, or use schedule interleaved"
            )
        if self.dp % self.ep:
            raise ValueError(
                f"parallel: ep is {self.ep} and dp is {self.dp}; ep must be a divisor of dp, because replicas share the experts"
            )
        object.__setattr__(self, "slices", self.slices or self.tp)
        object.__setattr__(self, "chunks", self.chunks or self.cp)
        if self.ring and self.chunks == 1:
            raise ValueError(
                "parallel: ring needs cp above 1, because it is a way for the ranks of cp to compute attention; leave "
                "ring out, or raise cp"
            )
        for whole, part in (("slices", "tp"), ("chunks", "cp")):
            ratio, rest = divmod(getattr(self, whole), getattr(self, part))
            if rest or not (_is_power(ratio) or getattr(self, part) == 1):
                raise ValueError(
                    f"parallel: {whole} is {getattr(self, whole)} and {part} is {getattr(self, part)}; {whole} must "
                    f"be {part} times a power of two, so that each rank computes whole branches of the summation tree"
                )

    @property
    def ranks(self) -> int:
        """The number of processes."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def parts(self) -> int:
        """The number of parts into which the layers are divided."""
        return self.pp * self.virtual

    @property
    def expert_replicas(self) -> int:
        """The number of replicas that hold the same experts."""
        return self.dp // self.ep

    @property
    def dealt(self) -> bool:
        """How micro-batches are assigned to replicas. True: one by one, in turn, because gradients are reduced after each of
        them. False: a contiguous range for each replica."""
        return self.zero >= 2

    def owner(self, micro_batch: int, micro_batches: int) -> int:
        """The replica that computes a micro-batch of an update."""
        return micro_batch % self.dp if self.dealt else micro_batch * self.dp // micro_batches

    def place(self, rank: int) -> dict[str, int]:
        """The place of a rank along each dimension."""
        rest, found = rank, {}
        for name in ("tp", "cp", "dp", "pp"):
            rest, found[name] = divmod(rest, getattr(self, name))
        return found

    def layers_of(self, part: int, layers: int) -> range:
        """The layers of a part. If they cannot be divided equally, the first parts have one more layer each."""
        least, more = divmod(layers, self.parts)
        start = part * least + min(part, more)
        return range(start, start + least + (part < more))

    def check(self, shape: Shape) -> None:
        """Raise ValueError, with a message of one sentence, if the plan does not fit."""
        for name, what, count in (
            ("slices", "heads", shape.heads), ("slices", "key and value heads", shape.kv_heads),
            ("slices", "feed-forward width", shape.inner), ("chunks", "tokens of a micro-batch", shape.tokens),
            ("chunks", "key and value heads of a slice", 0 if self.ring else shape.kv_heads // self.slices),
            ("dp", "micro_batches", shape.micro_batches),
        ):  # fmt: skip
            if (by := getattr(self, name)) and count % by:
                raise ValueError(f"parallel: {name} {by} does not divide the {what}, {count}")
        if shape.tokens % (parts := self.slices * self.chunks):
            raise ValueError(
                f"parallel: slices times chunks is {parts}, which does not divide the {shape.tokens} tokens of a micro-batch"
            )
        if self.parts > shape.layers:
            raise ValueError(f"parallel: pp {self.pp} times virtual {self.virtual} is more than the {shape.layers} layers")
        own = shape.micro_batches // self.dp
        if shape.tree and self.dp > 1 and not _is_power(self.dp if self.dealt else own):
            counted = f"dp is {self.dp}" if self.dealt else f"each replica has {own} micro-batches of an update"
            raise ValueError(
                f"parallel: {counted}; accumulate tree needs a power of two here, so that each rank computes whole branches of "
                "the summation tree"
            )
        if self.schedule in ("interleaved", "zero-bubble") and self.pp > 1 and own % self.pp:
            raise ValueError(
                f"parallel: schedule {self.schedule} needs a multiple of pp ({self.pp}) as the number of "
                f"micro-batches per replica, got {own}"
            )
        if self.chunks > self.cp and (self.cp > 1 or self.pp > 1 or (self.sp and self.tp > 1)):
            raise ValueError(
                f"parallel: chunks is {self.chunks} and cp is {self.cp}; they must be equal unless cp and pp are 1 and "
                "sp is off"
            )
        if self.pp > 1 and self.zero > 1:
            raise ValueError(f"parallel: zero {self.zero} cannot be combined with pp; use zero 1")
        self._check_experts(shape)
        if shape.whole and (self.zero or self.slices > 1 or self.ep > 1):
            raise ValueError(f"parallel: {shape.whole} needs whole parameters, but zero, tp and ep divide them; use adamw")
        if shape.ragged and (self.sp or self.chunks > 1 or self.slices > 1 or self.pp > 1):
            raise ValueError(
                "parallel: conversations and pairs fill rows to different lengths, which sp, tp, cp and pp cannot "
                "divide; use dp"
            )

    def _check_experts(self, shape: Shape) -> None:
        if self.ep == 1:
            return
        if not shape.experts or shape.experts % self.ep:
            if not shape.experts:
                raise ValueError(f"parallel: ep is {self.ep}, but the model has no experts; leave ep out")
            raise ValueError(
                f"parallel: ep {self.ep} does not divide the {shape.experts} experts; use a divisor, or leave ep out"
            )
        if self.zero > 1:
            raise ValueError(f"parallel: zero {self.zero} cannot be combined with ep; use zero 1")
        if shape.tree and not _is_power(self.expert_replicas):
            raise ValueError(
                f"parallel: each expert has {self.expert_replicas} replicas (dp / ep); accumulate tree needs a power of two "
                "here, so that each rank computes whole branches of the summation tree"
            )

    def __str__(self) -> str:
        given = {one.name: getattr(self, one.name) for one in fields(self) if getattr(self, one.name) != one.default}
        for whole, part in (("slices", "tp"), ("chunks", "cp")):
            if given.get(whole) == getattr(self, part):
                del given[whole]
        return ",".join(f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in given.items())

    @classmethod
    def read(cls, given: "Plan | Mapping[str, Any] | str") -> "Plan":
        """Read a plan from a table of a TOML file, or from text such as "dp=2,zero=3". A name without a value means true."""
        if isinstance(given, Plan):
            return given
        table = dict(_entries(given)) if isinstance(given, str) else dict(given)
        known = [one.name for one in fields(cls)]
        for name in table:
            if name not in known:
                close = difflib.get_close_matches(name, known, 1)
                meant = f"did you mean {close[0]!r}?" if close else f"the options are {', '.join(known)}"
                raise ValueError(f"parallel has no option {name!r}; {meant}")
        return cls(**table)

    def alone(self) -> "Plan":
        """The plan with which a single process computes bitwise the same results."""
        return replace(Plan(), slices=self.slices, chunks=self.chunks, ring=self.ring)

    def table(self) -> dict[str, Any]:
        """All fields, as JSON values."""
        return asdict(self)


def _is_power(number: int) -> bool:
    return number > 0 and not number & (number - 1)


def _entries(text: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (word.strip() for word in entry.partition("="))
        words = {"true": True, "false": False, "": True}
        found.append((name, int(value) if value.isdecimal() else words.get(value, value) if equals or not value else value))
    return found
