"""The runner: runs the scheduler's steps on the model and returns the samples.

On a GPU, `launch` only enqueues, so the host prepares a step while the device runs the one before. Samples stay on the device
(`_last`, one entry per slot) as input of the next step, and reach the host through pinned memory. Decode steps replay captured
graphs; so do, as an option, steps with prompts and few tokens. Other steps run eagerly. On a CPU the same code runs at once.

The head runs once per step, on the sampled rows. If a row edits its logits or requests log-probabilities, the whole step goes
through the edits, which do not change the other rows. A step with masked rows computes its logits, and samples when its masks
are known.

One thread may load a model and another run it. All launches are inside `on_device`, because device 0 is the current device of
every new thread, and Triton launches on the current device, whatever device its arguments are on.

Runners are made in `tilewright.engine.loading`.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import compress

import numpy as np
import torch
from torch import Tensor

from tilewright.engine.batch import Packer
from tilewright.engine.graphs import Bodies, DecodeGraph, DecodeGraphs, Derive, Tails, rehearse
from tilewright.engine.head import FULL, PLAIN, SCORED, Head, turns_of
from tilewright.engine.layout import Inputs, Layout
from tilewright.engine.mixed_graphs import MixedGraph, MixedGraphs
from tilewright.engine.prompt_logprobs import prompt_logprobs, read_prompt_logprobs
from tilewright.engine.sampler import LogitTables, LogprobTensors, Mask, Masks
from tilewright.engine.slots import NOTHING, SlotState
from tilewright.engine.step import DeviceLost, FillMasks, RowFault, Step, StepResult, agreed_rows
from tilewright.engine.team import Notice, Team
from tilewright.engine.tickets import Ticket, Waiting
from tilewright.engine.tier import HostTier
from tilewright.engine.warm import padding_inputs, warm_sizes
from tilewright.models import Model
from tilewright.models.draft_heads import DraftHead
from tilewright.nn import LoraStack
from tilewright.op import invariant

__all__ = ["ModelRunner", "Progress", "on_device", "scope_of"]

Progress = Callable[[str], None]


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes a CUDA device the thread's current device; does nothing for other devices."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def scope_of(batch_invariant: bool) -> Callable[[], AbstractContextManager[None]]:
    """A function that makes the context in which steps run."""
    return invariant if batch_invariant else nullcontext


class ModelRunner:
    """Runs the steps of one model on one device, or on several devices with a `team`."""

    def __init__(
        self, model: Model, *, num_pages: int, page_size: int, max_seqs: int, max_model_len: int, max_tokens_per_step: int,
        max_samples: int | None = None, row_tokens: int = 1, batch_invariant: bool = False,
        cache_dtype: torch.dtype | None = None, host_pages: int = 0, explains_draws: bool = False, team: Team | None = None,
        window_pages: int = 0, prompt_graphs: bool = False, columns: bool = False, masks: bool = True,
    ):  # fmt: skip
        """`max_samples`: per step, if more than `max_seqs`; rows with drafts have several, up to `row_tokens`. `host_pages`:
        pages of host memory for evicted pages. `explains_draws`: return `TokenLogprobs.drawn` with log-probabilities, except in
        steps where a row with drafts edits its logits. `team`: other ranks, which run each step on their shares.
        `window_pages`: pages of windowed layers; 0: they have none of their own. `prompt_graphs`: see mixed_graphs.py.
        `columns`: return log-probabilities of samples as `StepResult.columns`; then all requests must request them. `masks`:
        whether steps can have masked rows."""
        self.model = model
        self.device = model.embed.weight.device
        self.max_seqs = max_seqs
        self.max_samples, self._row_tokens = max(max_seqs, max_samples or 0), row_tokens
        self.max_tokens_per_step = max_tokens_per_step
        self._scope, self._team, self._columns = scope_of(batch_invariant), team, columns
        self.asynchronous = self.device.type == "cuda"
        self.launching = False
        """True while a step is launched; a kernel that is compiled now should have been compiled in the warm-up."""
        self.kinds = 2 if window_pages else 1
        pools = {"window_pages": window_pages} if window_pages else {}
        self.cache = model.empty_cache(num_pages, page_size, cache_dtype, **pools)
        self.tier = HostTier(self.cache, host_pages) if host_pages else None
        self._max_pages = -(-max_model_len // page_size)
        vocab = model.config.vocab_size
        self._edits = LogitTables(max_seqs=max_seqs, vocab_size=vocab, device=self.device)
        self.masks = Masks(most=self.max_samples, vocab_size=vocab, device=self.device)
        self._adapts = any(isinstance(module, LoraStack) for module in model.modules())
        self._packer = Packer(
            page_size=page_size, max_seqs=max_seqs, max_pages=self._max_pages, place=self._edits.place,
            # With adapters, products have other epilogues, and a row gets other bits.
            always_adapted=self._adapts and batch_invariant, kinds=self.kinds)  # fmt: skip
        self._last = torch.zeros(max_seqs + 1, dtype=torch.int64, device=self.device)
        self._state: SlotState | None = None
        if team is None and not isinstance(model, DraftHead):  # its next state may lie on a page beyond those of the row
            sizes = {"max_pages": self._max_pages, "page_size": page_size, "kinds": self.kinds}
            self._state = SlotState(self._packer.lines, self._last, **sizes)
        self._head = Head(model, self._edits, self._last, explains_draws=explains_draws)
        self._tails = Tails(self._head.logits, self._head.tails, self.masks.of_graph if masks else None)
        self._graphs: DecodeGraphs | None = None
        self._mixed: MixedGraphs | None = None
        self._captures_prompts = prompt_graphs
        # At most two steps are in flight, so each of three buffers has been read long before it is used again.
        longest = Layout(max(max_tokens_per_step, max_seqs), max_seqs, self.max_samples, kinds=self.kinds).nbytes
        longest += self.kinds * max_seqs * self._max_pages * 4
        longest = max(longest, SlotState.nbytes(max_seqs, self._max_pages, self.kinds))
        self._staging = [torch.zeros(longest, dtype=torch.uint8, pin_memory=self.asynchronous) for _ in range(3)]
        self._arrivals = [
            (
                torch.zeros(self.max_samples, dtype=torch.int64, pin_memory=self.asynchronous),
                LogprobTensors.on_host(self.max_samples, pinned=self.asynchronous),
            )
            for _ in range(3)
        ]
        self._turn = 0

    # ---- steps

    def launch(self, step: Step) -> Ticket:
        """Enqueue a step; on a CPU, run it.

        Raises:
            RowFault: one request's numbers cannot be packed; nothing was launched.
            DeviceLost: the device no longer responds.
        """
        self.launching = True
        try:
            with self._entered(), self._told_apart():
                return self._launch(step)
        finally:
            self.launching = False

    @contextmanager
    def _entered(self) -> Iterator[None]:
        with on_device(self.device), torch.inference_mode(), self._scope():
            yield

    @contextmanager
    def _told_apart(self) -> Iterator[None]:
        """Turns an error into `DeviceLost` if the device no longer responds; a working device passes the check at once."""
        try:
            yield
            if self._team is not None:
                self._team.check()  # an aborted exchange ends without an error
        except RuntimeError as error:
            if self._team is not None and not isinstance(error, DeviceLost | RowFault):
                raise self._team.lost(error) from error
            if self.device.type == "cuda":
                try:
                    torch.cuda.synchronize(self.device)
                except RuntimeError as lost:
                    raise DeviceLost(f"{self.device} answers no more: {lost}") from error
            raise

    def _launch(self, step: Step) -> Ticket:
        self._packer.refresh(step)  # before anything is enqueued, because it may raise RowFault
        graph = self._graph(step)
        adapted = self._adapts and self._packer.adapted(step)
        if self._state is not None and (step.alike if graph is None else graph.derives):
            inputs = self._derived(self._state, step, graph)
        else:
            inputs = self._packed(step, graph)
        self._copy_pages(step)
        ticket = Ticket(step, None, None)
        if graph is None:
            hidden = (self._adapted_body if adapted else self._body)(inputs)
        else:
            graph.run(adapted)
            hidden = graph.hidden
        if self._packer.prompts_explained(step):
            ticket.prompt_logprobs = prompt_logprobs(step, hidden, self.model.logits)
        if isinstance(graph, MixedGraph):  # captured without head and sampling
            inputs, graph = inputs.sampled(int(step.samples.sum())), None
        turns = any(self._edits.edited[step.slots[i]] for i in step.drafts)
        ticket.waiting = Waiting(inputs, hidden, None if turns else graph, self._turn, turns)
        if step.masked:  # the device computes the logits while the masks are filled
            if ticket.waiting.graph is None:
                ticket.waiting.logits = self._head.logits(inputs, hidden)
            else:
                ticket.waiting.graph.logits()
            self.masks.wanted()
        else:
            self._finish(ticket, None)
        self._turn = (self._turn + 1) % 3
        return ticket

    def _derived(self, state: SlotState, step: Step, graph: DecodeGraph | MixedGraph | None) -> Inputs:
        """The inputs of a step whose rows have one token each. A graph derives its inputs itself."""
        assert not isinstance(graph, MixedGraph)
        changes, rows, adapters = self._packer.changes(step), NOTHING, NOTHING
        if graph is None:
            inputs = state.padding(step.slots.size, self._packer.longest(step))
        else:
            inputs = graph.inputs
        if graph is None or graph.slots is not step.slots:
            rows = np.full(inputs.sampled_slots.numel(), self.max_seqs, np.int64)
            rows[: step.slots.size] = step.slots
            adapters = self._packer.adapters(rows) if self._adapts else NOTHING
            if graph is not None:
                graph.slots = None
        state.tell(changes, rows, adapters, inputs, self._staging[self._turn])
        if graph is None:
            state.derive(inputs)
        else:
            graph.slots = step.slots
        return inputs

    def _packed(self, step: Step, graph: DecodeGraph | MixedGraph | None) -> Inputs:
        """The inputs of any other step."""
        if graph is not None:
            layout = graph.layout
            longest = layout.counts[0] if isinstance(graph, MixedGraph) else layout.each or 1
        else:
            tokens, samples = int(step.counts.sum()), int(step.samples.sum())
            layout, longest = Layout(tokens, step.slots.size, samples, kinds=self.kinds), int(step.counts.max())
        packed, table = self._to_device(step, layout, self._packer.longest(step))
        if self._team is not None:
            assert not isinstance(graph, MixedGraph), "followers have no such graphs"
            self._tell(self._team, step, layout, table.shape[2], longest, graph)
        if graph is not None:
            graph.take(packed, table)
        return layout.device(packed, table, longest)

    def _tell(self, team: Team, step: Step, layout: Layout, width: int, longest: int, graph: DecodeGraph | None) -> None:
        """Send the step to the other ranks."""
        size = layout.nbytes + 4 * step.slots.size * width
        rows = (0, 0) if graph is None else (graph.layout.seqs, graph.layout.each or 1)
        notice = Notice(*layout.counts, longest, width, *rows, len(step.copies), size)
        team.tell(notice, self._staging[self._turn][:size].numpy(), step.copies)

    def check(self) -> None:
        """Raises DeviceLost if another rank has ended."""
        if self._team is not None:
            self._team.check()

    def _graph(self, step: Step) -> DecodeGraph | MixedGraph | None:
        """The captured step that this one fits into; None: run eagerly."""
        if self._graphs is None:
            return None
        if not (step.counts is step.samples or (step.counts == step.samples).all()):  # the step contains a prompt
            mixed = None if step.drafts else self._mixed
            return None if mixed is None else mixed.of_step(int(step.counts.sum()), step.slots.size)
        if not step.drafts:
            return self._graphs.for_rows(step.slots.size)
        # A graph gives each row room for `row_tokens` tokens; all of these positions must exist in the block table.
        room = self._max_pages * self._packer.page_size - int(step.starts.max())
        return self._graphs.for_drafts(step.slots.size) if room >= self._row_tokens >= step.counts.max() else None

    def sample(self, ticket: Ticket, words: int, fill: FillMasks) -> None:
        """Sample a step with masked rows; see `Runner.sample`. Raises DeviceLost."""
        assert ticket.waiting is not None
        self.launching = True
        try:
            with self._entered(), self._told_apart():
                self._finish(ticket, self.masks.sent(ticket.step.masked_samples, words, fill))
        finally:
            self.launching = False

    def _finish(self, ticket: Ticket, mask: Mask | None) -> None:
        """Run head and sampling of a launched step."""
        waiting, ticket.waiting = ticket.waiting, None
        assert waiting is not None
        if ticket.step.samples.any():
            self._send_samples(ticket, waiting, mask)
        if self.asynchronous:
            ticket.done = torch.cuda.Event()
            ticket.done.record()

    def _copy_pages(self, step: Step) -> None:
        if step.out or step.back:
            assert self.tier is not None, "pages go to the host where there is a tier"
            self.tier.move(step.out, step.back)
        for windowed in (False, True) if step.copies else ():
            chosen = [(~a, ~b) if windowed else (a, b) for a, b in step.copies if (a < 0) is windowed]
            if chosen:
                pairs = torch.tensor(chosen, dtype=torch.int64).to(self.device, non_blocking=True)
                self.cache.copy_pages(pairs[:, 0], pairs[:, 1], **({"windowed": True} if windowed else {}))

    def collect(self, ticket: Ticket) -> StepResult:
        """Wait for a step and read its samples. Raises DeviceLost if the device no longer responds."""
        if ticket.done is not None:
            with on_device(self.device), self._told_apart():  # otherwise CUDA may open a context on device 0 for waiting
                ticket.done.synchronize()
        step = ticket.step
        rows, samples = step.samples, np.zeros(0, np.int64) if ticket.tokens is None else ticket.tokens.numpy()
        counts, logprobs, columns = rows, [], None
        if ticket.logprobs is not None and self._columns:
            columns = ticket.logprobs.columns(samples.size)
        elif ticket.logprobs is not None:
            logprobs = ticket.logprobs.read([r.params.logprobs for r, n in zip(step.requests, rows.tolist()) for _ in range(n)])
        if step.drafts:
            counts, stays = agreed_rows(step, samples)
            samples, logprobs, columns = samples[stays], list(compress(logprobs, stays)), columns and columns.take(stays)
        return StepResult(samples.copy(), counts, logprobs, columns, read_prompt_logprobs(step, ticket.prompt_logprobs))

    def _to_device(self, step: Step, layout: Layout, width: int) -> tuple[Tensor, Tensor]:
        """One copy to the device: (the packed arrays, the block tables [kinds, B, width])."""
        staging = self._staging[self._turn]
        shape = (self.kinds, step.slots.size, width)
        end = layout.nbytes + 4 * self.kinds * step.slots.size * width
        self._packer.fill(layout.host(staging.numpy()), step, layout.each)
        host_table = staging[layout.nbytes : end].view(torch.int32).view(shape)
        np.take(self._packer.tables[:, :, :width], step.slots, axis=1, out=host_table.numpy())
        arrived = staging[:end].to(self.device, non_blocking=True)
        return arrived[: layout.nbytes], arrived[layout.nbytes :].view(torch.int32).view(shape)

    def _body(self, inputs: Inputs) -> Tensor:
        """hidden [T, E]; tokens sampled in the step before are read from `_last`."""
        if inputs.feed is None:
            return self.model(inputs.token_ids, inputs.batch, self.cache)
        token_ids = torch.where(inputs.feed >= 0, self._last[inputs.feed.clamp_min(0)], inputs.token_ids)
        return self.model(token_ids, inputs.batch, self.cache)

    def _adapted_body(self, inputs: Inputs) -> Tensor:
        """The same for a step in which rows have adapters."""
        return self._body(inputs._replace(batch=inputs.adapted))

    @property
    def _bodies(self) -> Bodies:
        return self._body, self._adapted_body if self._adapts else None

    def _send_samples(self, ticket: Ticket, waiting: Waiting, mask: Mask | None) -> None:
        """Draw the step's samples and send them to the host, with their log-probabilities if rows request them."""
        step, inputs = ticket.step, waiting.inputs
        count, explained = int(step.samples.sum()), self._packer.explained(step)
        edited = self._edits.edited[step.slots[step.samples > 0]].any()
        tail = FULL if edited else SCORED if explained else PLAIN
        if waiting.in_turns:
            drawn = self._head.in_turns(inputs, waiting.hidden, mask, turns_of(step, self.device), waiting.logits)
        elif waiting.graph is None:
            drawn = self._head.tails[tail](inputs, waiting.hidden, mask, waiting.logits)
        else:
            drawn = waiting.graph.sample(tail) if mask is None else waiting.graph.sample_masked(tail)
        tokens, logprobs = self._arrivals[waiting.turn]
        ticket.tokens = tokens[:count]
        ticket.tokens.copy_(drawn.tokens[:count], non_blocking=True)
        if explained and drawn.logprobs is not None:
            ticket.logprobs = drawn.logprobs.sent(count, logprobs)

    # ---- readiness

    def warmup(self, progress: Progress) -> None:
        """Launch every kernel that a later step can launch, so that no step compiles."""
        if self.device.type != "cpu":
            with self._entered():
                self._warmup(progress)

    def _warmup(self, progress: Progress) -> None:
        sizes = warm_sizes(self.max_tokens_per_step)
        for i, (tokens, longest) in enumerate(sizes):
            progress(f"warming up kernels {i + 1}/{len(sizes)}")
            self._warm_prefill(tokens, longest)
        derive = None if self._state is None else Derive(self._state.derive, self.max_seqs)
        if self.device.type == "meta":
            rehearse(
                self._bodies, self._tails, derive, max_seqs=self.max_seqs, max_pages=self._max_pages,
                row_tokens=self._row_tokens, max_samples=self.max_samples, kinds=self.kinds,
            )  # fmt: skip
            return
        self._graphs = DecodeGraphs(
            self._bodies, self._tails, derive, device=self.device, max_seqs=self.max_seqs, max_pages=self._max_pages,
            row_tokens=self._row_tokens, max_samples=self.max_samples, progress=progress, kinds=self.kinds,
        )  # fmt: skip
        if self._captures_prompts and self._state is not None:
            self._mixed = MixedGraphs(
                self._bodies, device=self.device, max_seqs=self.max_seqs, max_pages=self._max_pages,
                max_tokens=self.max_tokens_per_step, pool=self._graphs.pool, progress=progress, kinds=self.kinds,
            )  # fmt: skip
        torch.cuda.synchronize(self.device)

    def _warm_prefill(self, tokens: int, longest: int) -> None:
        """One eager step of `tokens` padding tokens, which changes no page."""
        inputs = padding_inputs(tokens, longest, self.max_seqs, self.max_samples, self.device, self.kinds)
        hidden = self._body(inputs)
        if self._adapts:
            hidden = self._adapted_body(inputs)
        self._tails.run_all(inputs, hidden)
