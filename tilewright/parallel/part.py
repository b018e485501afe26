"""Reduces a whole model to one rank's part: some of the layers, some slices of these layers, and some rows of the weights."""

from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from tilewright.nn import Attention, MoE, RMSNorm
from tilewright.nn.shard import SHARDS, Replicate, Row
from tilewright.parallel.context import Across, Chunked, InSlices
from tilewright.parallel.expert import DealtExperts, expert_pieces
from tilewright.parallel.fetch import Fetched
from tilewright.parallel.mesh import Mesh
from tilewright.parallel.pieces import Part, whole_pieces
from tilewright.parallel.pipeline import keep_layers
from tilewright.parallel.plan import Plan
from tilewright.parallel.ranks import Ranks
from tilewright.parallel.replicate import RowShards
from tilewright.parallel.ring import Ring
from tilewright.parallel.tensor import Sliced, SlicedNorm, narrow, own_tokens, shallow
from tilewright.parallel.vocabulary import SlicedEmbedding, SlicedHead, plain_vocabulary

__all__ = ["make_part", "refusal"]


def make_part(model: Any, plan: Plan, mesh: Mesh, *, invariant: bool) -> Part:
    """Divide a decoder (`embed`, `blocks`, `norm`, `head`) according to the plan. The part reuses the decoder's modules, so do
    not use the decoder afterwards."""
    if (why := refusal(model, plan)) is not None:
        raise ValueError(why)
    part = Part(model=model, pieces=whole_pieces(model), uses={})
    if model.head.weight is model.embed.weight and model.embed.weight.requires_grad:
        # The two uses of a tied weight have separate gradient sums, so the result is the same whether one rank has both uses or
        # not.
        model.head.weight = nn.Parameter(model.embed.weight.data)
        part.uses["embed.weight"] = ["head.weight"]
    if plan.ep > 1:
        _deal(part, mesh, invariant)
    if plan.slices > 1:
        _cut_layers(part, plan, mesh, invariant)
    if plan.chunks > 1:
        _chunk(part, plan, mesh)
    if plan.pp > 1:
        _keep(part, plan, mesh)
    if plan.zero == 3:
        _fetch(part, mesh)
    return part


def _deal(part: Part, mesh: Mesh, invariant: bool) -> None:
    """Reduce each mixture to the experts of this rank."""
    dealt: set[str] = set()
    for index, block in enumerate(part.model.blocks):
        if isinstance(block.ffn, MoE):
            home, whole = f"blocks.{index}.ffn", block.ffn
            block.ffn = DealtExperts(whole, mesh.ep, invariant)
            for name in ("experts_gate_up", "experts_down"):
                del part.pieces[f"{home}.{name}.weight"]
            part.pieces |= expert_pieces(home, whole, mesh.ep)
            for own in ("gate_up", "down"):
                first, *others = (f"{home}.{own}.{place}" for place in range(len(getattr(block.ffn, own))))
                part.uses[first] = others
                dealt |= {first, *others}
    part.dealt = frozenset(dealt)


def _fetch(part: Part, mesh: Mesh) -> None:
    """Reduce each block to this replica's rows of the weights."""
    shards = RowShards(mesh.dp)
    renamed: dict[str, str] = {}
    for index, block in enumerate(part.model.blocks):
        fetched = part.model.blocks[index] = Fetched(block, shards, mesh.cp)
        renamed |= {f"blocks.{index}.{name}": f"blocks.{index}.rows.{place}" for place, name in enumerate(fetched.names)}
        part.fetched.append(fetched)
    spans = {name: shards.span(piece.size[0]) for name, piece in part.pieces.items()}
    part.pieces = {
        renamed.get(name, name): piece.narrowed(*spans[name]) if name in renamed else piece
        for name, piece in part.pieces.items()
    }
    part.uses = {renamed.get(name, name): [renamed.get(use, use) for use in uses] for name, uses in part.uses.items()}
    part.summed = frozenset(renamed.get(name, name) for name in part.summed)


def refusal(model: Any, plan: Plan) -> str | None:
    """The reason why a plan cannot divide a decoder (which may be on "meta"), or None. Data parallelism and ZeRO are possible
    for every model."""
    if plan.slices == plan.chunks == plan.pp == 1:
        return None
    names = {"attn_norm", "attn", "ffn_norm", "ffn"}
    for index, block in enumerate(model.blocks):
        plain = {name for name, _ in block.named_children()} == names
        mixture = isinstance(block.ffn, MoE) and plan.slices == plan.chunks == 1
        plain = plain and all(isinstance(norm, RMSNorm) for norm in (block.attn_norm, block.ffn_norm))
        plain = plain and getattr(block.attn, "early_rope", None) is None
        plain = plain and type(block.attn) in SHARDS and (type(block.ffn) in SHARDS or mixture)
        if not plain or getattr(block.attn, "wide_norm_eps", None) is not None:
            return (
                f"parallel: tp, cp and pp cannot divide block {index} of this model, which must consist of an RMS "
                "norm, attention, an RMS norm and a feed-forward layer, and nothing else; use only dp and zero"
            )
        if plan.ring and block.attn.window is not None:
            return f"parallel: block {index} has sliding-window attention, which ring does not support; leave ring out"
        if plan.chunks > plan.cp and plan.slices > 1 and block.attn.out.bias is not None:
            return (
                "parallel: chunks and slices cannot be combined if the output projection of attention has a bias; leave "
                "one of them out"
            )
    return None


def _chunk(part: Part, plan: Plan, mesh: Mesh) -> None:
    """Make attention work across chunks. If all chunks are in this process, compute them one after the other."""
    model = part.model
    for layer in (module for module in model.modules() if isinstance(module, Attention)):
        layer.register_forward_pre_hook(partial(_attends, plan, mesh.cp))
    if plan.cp > 1:
        return
    for index, block in enumerate(model.blocks):
        for name in ("attn_norm", "ffn_norm", "ffn"):
            _by_chunks(part, f"blocks.{index}.{name}", block, name, plan.chunks)
        for home, layer in list(block.attn.named_modules(prefix=f"blocks.{index}.attn")):
            for name in ("qkv", "out") if isinstance(layer, Attention) else ():
                _by_chunks(part, f"{home}.{name}", layer, name, plan.chunks)
    for name in ("embed", "norm"):
        _by_chunks(part, name, model, name, plan.chunks)


def _attends(plan: Plan, ranks: Ranks, module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
    x, batch, keys_values = given
    if plan.ring:
        return x, batch, Ring(keys_values, ranks, plan.chunks)
    return x, batch, InSlices(keys_values, plan.chunks) if ranks.size == 1 else Across(keys_values, ranks)


def _by_chunks(part: Part, home: str, owner: Any, name: str, chunks: int) -> None:
    """Replace a module by one that computes chunk by chunk. This changes the names of its parameters."""
    setattr(owner, name, Chunked(getattr(owner, name), chunks))

    def new(old: str) -> str:
        return f"{home}.module.{old.removeprefix(f'{home}.')}" if old.startswith(f"{home}.") else old

    part.pieces = {new(old): piece for old, piece in part.pieces.items()}
    part.uses = {new(old): [new(use) for use in uses] for old, uses in part.uses.items()}
    part.summed = frozenset(map(new, part.summed))


def _keep(part: Part, plan: Plan, mesh: Mesh) -> None:
    """Keep only the modules that this rank's layers need."""
    model = part.model
    keep_layers(model, plan, mesh.pp.rank)
    left = {name for name, _ in model.named_parameters()}
    tied: set[str] = set()
    for name in [name for name in part.uses if name.startswith("embed.")]:
        (head,) = part.uses[name]
        tied |= {name, head} & left if mesh.pp.rank in {0, plan.pp - 1} else set()
        if name not in left:
            part.pieces[head] = part.pieces[name]
        if not {name, head} <= left:
            part.uses.pop(name)
    part.tied = frozenset(tied)
    part.pieces = {name: piece for name, piece in part.pieces.items() if name in left}
    part.dealt &= left
    part.uses = {name: uses for name, uses in part.uses.items() if name in left}
    part.summed &= left


def _cut_layers(part: Part, plan: Plan, mesh: Mesh, invariant: bool) -> None:
    model, here = part.model, plan.slices // plan.tp
    summed: set[str] = set()
    cut = plan.sp and plan.tp > 1
    parts = here if cut else plan.slices if invariant else 1
    for index, block in enumerate(model.blocks):
        for name in ("attn", "ffn"):
            setattr(block, name, _sliced(part, f"blocks.{index}.{name}", getattr(block, name), plan, mesh, parts, summed))
    for index, block in enumerate(model.blocks):
        for name in ("attn_norm", "ffn_norm"):
            setattr(block, name, _norm(part, f"blocks.{index}.{name}", getattr(block, name), parts))
    model.norm = _norm(part, "norm", model.norm, parts)
    if cut:
        summed |= {name for name, piece in part.pieces.items() if "norms.0" in name or "biases.0" in name}
        model.norm.whole = mesh.tp
    if plain_vocabulary(model) and model.embed.weight.shape[0] % plan.slices == 0:
        _cut_vocabulary(part, plan, mesh, cut)
    elif cut:
        model.embed.register_forward_hook(lambda module, given, out: own_tokens(out, mesh.tp))
    part.summed = frozenset(summed)


def _cut_vocabulary(part: Part, plan: Plan, mesh: Mesh, cut: bool) -> None:
    """Reduce the embedding and the head to this rank's slices of their rows."""
    model, here = part.model, plan.slices // plan.tp
    first, tied = mesh.tp.rank * here, "embed.weight" in part.uses
    part.uses.pop("embed.weight", None)
    made: dict[str, list[nn.Parameter]] = {}
    for name in ("embed", "head"):
        weight, made[name] = getattr(model, name).weight, []
        each = weight.shape[0] // plan.slices
        for place in range(here):
            own = slice((first + place) * each, (first + place + 1) * each)
            shared = tied and name == "head"
            made[name].append(nn.Parameter(made["embed"][place].data if shared else weight.data[own].clone()))
            if shared:
                part.uses[f"embed.slices.{place}"] = [f"head.slices.{place}"]
            else:
                piece = part.pieces[f"{name}.weight"]
                part.pieces[f"{name}.slices.{place}"] = replace(piece, rows=((own.start, own.stop),))
        part.pieces.pop(f"{name}.weight", None)
    model.embed = SlicedEmbedding(made["embed"], first, mesh.tp, cut)
    model.head = SlicedHead(made["head"], first, mesh.tp)


def _sliced(part: Part, home: str, layer: Any, plan: Plan, mesh: Mesh, parts: int, summed: set[str]) -> Sliced:
    """The slices of a layer that this rank holds. Their pieces are recorded in `part`."""
    here = plan.slices // plan.tp
    old = {name: part.pieces.pop(f"{home}.{name}") for name, _ in layer.named_parameters()}
    made = []
    for place in range(here):
        slice_, pieces = narrow(layer, mesh.tp.rank * here + place, plan.slices)
        made.append(slice_)
        for name, piece in pieces.items():
            first, own = f"{home}.layers.0.{name}", f"{home}.layers.{place}.{name}"
            if not isinstance(SHARDS[type(layer)][name.partition(".")[0]], Replicate):
                part.pieces[own] = replace(piece, of=f"{home}.{name}")
                continue
            if place == 0:
                part.pieces[own] = replace(piece, of=f"{home}.{name}")
                if mesh.tp.size > 1:
                    summed.add(own)
            else:
                part.uses.setdefault(first, []).append(own)
    behind = next(name for name, shard in SHARDS[type(layer)].items() if isinstance(shard, Row))
    bias, biases = getattr(layer, behind).bias, []
    if bias is not None:
        part.pieces[f"{home}.biases.0"] = old[f"{behind}.bias"]
        biases = [bias, *_again(part, bias, f"{home}.biases.{{}}", parts)]
    return Sliced(made, biases, mesh.tp, plan.sp)


def _again(part: Part, parameter: nn.Parameter, name: str, parts: int) -> list[nn.Parameter]:
    """Create further parameters that share the memory of `parameter`, which is the first of `parts`. They are recorded as its
    uses."""
    for place in range(1, parts):
        part.uses.setdefault(name.format(0), []).append(name.format(place))
    return [nn.Parameter(parameter.data) for _ in range(1, parts)]


def _norm(part: Part, home: str, norm: RMSNorm, parts: int) -> SlicedNorm:
    """A norm that is applied to `parts` parts of the tokens separately. Its pieces are recorded in `part`."""
    made = [norm]
    weight: Any = norm.weight
    for again in _again(part, weight, f"{home}.norms.{{}}.weight", parts):
        made.append(shallow(norm))
        made[-1]._parameters["weight"] = again
    part.pieces[f"{home}.norms.0.weight"] = part.pieces.pop(f"{home}.weight")
    return SlicedNorm(made)
