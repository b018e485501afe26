"""Layouts of a compiled kernel: which thread has which element, as text and as bases, parsed by Triton's own parser.

A kernel's TTGIR names its layouts (`#blocked`, `#mma`, `#shared` ...) and gives one to each tensor and buffer. `Layouts` passes
types of that text to MLIR, which returns the layout as Gluon represents it (`triton.experimental.gluon.language`), its linear
form (Zhou et al., "Linear Layouts", 2025: bases over GF(2)) and the number of shared-memory bank conflicts between two layouts.
"""

import math
import re
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from triton._C.libtriton import gluon_ir, ir
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend

__all__ = ["Bases", "Layouts", "TensorType", "words"]


class TensorType(NamedTuple):
    """The type of a tensor or buffer in TTGIR."""

    text: str
    """The text without the outermost "tensor<" or "!ttg.memdesc<" and ">": `128x64xbf16, #blocked`."""
    shape: tuple[int, ...]
    element: str
    """"bf16", "i64", "!tt.ptr<bf16>" ..."""
    shared: bool
    """Whether it is a buffer (in shared or tensor memory), not a tensor in registers."""

    @property
    def allocated(self) -> tuple[int, ...]:
        """Shape of the buffer of which this one is a part; its own shape if it is whole."""
        found = re.search(r"mutable, ([\dx]+)$", self.text)
        return tuple(int(n) for n in found[1].split("x"))[-len(self.shape) :] if found else self.shape

    @property
    def element_bits(self) -> int:
        """Bits of an element, or of the element to which a pointer points."""
        found = re.search(r"(\d+)(?:E\dM\d\w*)?>*$", self.element)
        return int(found[1]) if found else 0


class Bases(NamedTuple):
    """A layout of registers: the coordinates that each bit of a register number, a lane and a warp adds (by exclusive or)."""

    register: Sequence[Sequence[int]]
    lane: Sequence[Sequence[int]]
    warp: Sequence[Sequence[int]]


_MEMDESC, _TENSOR = "!ttg.memdesc<", "tensor<"
_SHAPE = re.compile(r"((?:\d+x)*)(.*)", re.DOTALL)


def types_in(text: str) -> list[TensorType]:
    """The tensors and buffers that a piece of TTGIR mentions, in order. A bare `<...>` is what `-> <...>` abbreviates."""
    found = []
    for start in re.finditer(r"tensor<|memdesc<|-> <", text):
        inside = _balanced(text, start.end())
        if start[0] == "tensor<" and inside.lstrip("0123456789x").startswith("!tt.tensordesc"):
            continue
        sizes, rest = _SHAPE.fullmatch(inside).groups()  # pyright: ignore[reportOptionalMemberAccess]
        shape = tuple(int(n) for n in sizes.split("x") if n)
        found.append(TensorType(inside, shape, rest.partition(",")[0].strip(), start[0] != "tensor<"))
    return found


def _balanced(text: str, start: int) -> str:
    """The text from `start` to the ">" that closes the bracket open there. The ">" of an arrow closes nothing."""
    depth = 1
    for i in range(start, len(text)):
        if text[i] == "<":
            depth += 1
        elif text[i] == ">" and text[i - 1] != "-":
            depth -= 1
            if not depth:
                return text[start:i]
    return text[start:]


class Layouts:
    """The layouts of one kernel's TTGIR."""

    def __init__(self, ttgir: str, arch: int):
        self._head = "\n".join(line for line in ttgir.splitlines() if re.match(r"#(?!loc)\w+ = ", line))
        module = re.search(r"^module attributes \{.*?\} \{", ttgir, re.MULTILINE)
        self._module = module[0] if module else "module {"
        self._context = ir.context()
        ir.load_dialects(self._context)
        make_backend(GPUTarget("cuda", arch, 32)).load_dialects(self._context)
        self._builder = gluon_ir.GluonOpBuilder(self._context)
        self._known: dict[str, Any] = {}
        # Triton 3.8 and later ask the module around a builder for its target machine.
        self._stage = self._module_of("i32")
        self._stage.walk(self._stand_in)

    def of(self, kind: TensorType) -> Any:
        """The layout as Gluon represents it; None if Gluon has no name for it, or if there is no layout or no such type."""
        if kind.text not in self._known:
            self._known[kind.text] = self._parse(kind) if "#" in kind.text else None
        return self._known[kind.text]

    def _stand_in(self, op: ir.operation) -> None:
        """Let the builder stand inside the function."""
        if op.get_name() == "tt.return":
            self._builder.set_insertion_point_to_start(op.get_block())

    def _module_of(self, kind: str) -> ir.module:
        """A module whose one function `f` takes an argument of this type."""
        program = f"{self._head}\n{self._module}\n tt.func public @f(%a: {kind}) {{ tt.return }}\n}}\n"
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "type.ttgir")
            path.write_text(program)
            module = ir.parse_mlir_module(str(path), self._context)
        module.context = self._context  # the module lives as long as its context
        return module

    def _parse(self, kind: TensorType) -> Any:
        read = self._builder.get_gluon_layout_from_memdesc if kind.shared else self._builder.get_gluon_layout_from_tensor
        try:
            module = self._module_of((_MEMDESC if kind.shared else _TENSOR) + kind.text + ">")
            return read(module.get_function("f").args(0))
        except (TypeError, ValueError, RuntimeError):
            return None

    def bases(self, kind: TensorType) -> Bases | None:
        """The linear form of a tensor's layout; None if `of` is None."""
        layout = self.of(kind)
        if layout is None or kind.shared:
            return None
        linear = self._builder.to_linear_layout(layout._to_ir(self._builder), list(kind.shape))
        return Bases(linear.reg_bases, linear.lane_bases, linear.warp_bases)

    def bank_conflicts(self, tensor: TensorType, buffer: TensorType) -> int | None:
        """Extra trips to shared memory of a warp's access by ld.shared or st.shared, beyond the minimum.

        None if a layout is unknown, and for a part of a buffer.
        """
        registers, shared = self.of(tensor), self.of(buffer)
        whole = tensor.shape == buffer.shape == buffer.allocated
        if registers is None or shared is None or not whole or "#ttng.tensor_memory" in buffer.text:
            return None
        if math.prod(buffer.shape) * buffer.element_bits <= 32 * 32:
            return 0  # no bank has two of its words; Triton's own count ends the process for some smaller layouts
        handles = (registers._to_ir(self._builder), shared._to_ir(self._builder))
        return self._builder.get_shared_bank_conflicts(*handles, list(tensor.shape), tensor.element_bits)

    def matrix_conflicts(self, buffer: TensorType) -> int | None:
        """Extra trips of an ldmatrix beyond the minimum: it reads 16 bytes of each of eight neighbouring rows at once.

        None if ldmatrix does not read this layout, or if it is unknown.
        """
        layout = self.of(buffer)
        match type(layout).__name__:
            case "NVMMASharedLayout" if layout.swizzle_byte_width:
                return 0  # its swizzles are made so that eight rows lie on all banks
            case "SwizzledSharedLayout" if layout.vec * buffer.element_bits >= 128:
                pitch = buffer.allocated[layout.order[0]] * buffer.element_bits // 128  # 16-byte words from row to row
                moved = layout.vec * buffer.element_bits // 128
                rows = range(min(8, buffer.shape[layout.order[1]]))
                banks = Counter((row * pitch + row // layout.per_phase % layout.max_phase * moved) % 8 for row in rows)
                return max(banks.values()) - 1
        return None


# ---- words


def words(layout: Any) -> str:
    """One sentence that describes a layout of Gluon."""
    name = type(layout).__name__
    tell = _WORDS.get(name)
    return tell(layout) if tell else f"{name}: a layout that this version cannot describe"


def _by(numbers: Sequence[int]) -> str:
    return "x".join(map(str, numbers))


def _blocked(layout: Any) -> str:
    rows = [str(dim) for dim in layout.order]
    order = f", dimension {rows[0]} fastest" if len(rows) > 1 else ""
    own = _by(layout.size_per_thread)
    held = "one element" if set(own) <= {"1", "x"} else f"{own} neighbours"
    return (
        f"blocked: a thread holds {held}, a warp is {_by(layout.threads_per_warp)} threads, "
        f"the block {_by(layout.warps_per_cta)} warps{order}"
    )


def _mma(layout: Any) -> str:
    unit = {2: "mma.sync, a warp at a time", 3: "wgmma, four warps at a time"}.get(layout.version[0], "tensor cores")
    tile = layout.instr_shape[:2] if layout.version[0] == 3 else layout.instr_shape[-2:]
    return (
        f"tensor-core accumulator ({unit}): {_by(tile)} a warp and instruction, "
        f"the block's warps stand {_by(layout.warps_per_cta)}"
    )


def _operand(layout: Any) -> str:
    side = "left" if layout.operand_index == 0 else "right"
    held = f"{layout.k_width} neighbours along K a thread"
    return f"{side} operand of a product, in registers: {held}, for a {words(layout.parent)}"


def _slice(layout: Any) -> str:
    return f"a vector, dimension {layout.dim} taken out of a layout: {words(layout.parent)}"


def _linear(layout: Any) -> str:
    bits = (len(layout.reg_bases), len(layout.lane_bases), len(layout.warp_bases))
    return (
        f"linear: given bit by bit, {1 << bits[0]} elements a thread, {1 << bits[1]} lanes, {1 << bits[2]} warps; "
        f"neighbouring registers step by {layout.reg_bases[0] if bits[0] else 'nothing'}, lanes by {layout.lane_bases[0]}"
    )


def _nvmma_shared(layout: Any) -> str:
    swizzle = f"swizzled over {layout.swizzle_byte_width} bytes" if layout.swizzle_byte_width else "not swizzled"
    way = ", read transposed" if layout.transposed else ""
    return f"shared memory as tensor cores and TMA read it: rows of {layout.element_bitwidth}-bit elements, {swizzle}{way}"


def _swizzled_shared(layout: Any) -> str:
    if layout.max_phase == 1:
        return "shared memory, rows as they are (no swizzle)"
    return (
        f"shared memory, swizzled: groups of {layout.vec} elements change places by exclusive or with the row number "
        f"(a new pattern every {layout.per_phase} rows, {layout.max_phase} patterns), so that a column spreads over the banks"
    )


def _padded_shared(layout: Any) -> str:
    pairs = ", ".join(f"{pad} elements after every {interval}" for interval, pad in layout.interval_padding_pairs)
    return f"shared memory, padded: {pairs}, so that a column spreads over the banks"


def _shared_linear(layout: Any) -> str:
    return f"shared memory, given bit by bit: {1 << len(layout.offset_bases)} elements, aligned to {layout.alignment} bytes"


def _tensor_memory(layout: Any) -> str:
    return f"tensor memory: an accumulator of {_by(layout.block)}, a row a lane"


_WORDS: Mapping[str, Any] = {
    "BlockedLayout": _blocked,
    "NVMMADistributedLayout": _mma,
    "DotOperandLayout": _operand,
    "SliceLayout": _slice,
    "DistributedLinearLayout": _linear,
    "NVMMASharedLayout": _nvmma_shared,
    "SwizzledSharedLayout": _swizzled_shared,
    "PaddedSharedLayout": _padded_shared,
    "SharedLinearLayout": _shared_linear,
    "TensorMemoryLayout": _tensor_memory,
}
