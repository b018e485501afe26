"""Grammars, compiled by llguidance. Before each sample they fill a mask of the tokens that may come next, one bit per token.

llguidance walks the tree of the vocabulary with a lexer and an Earley parser. Its work limits (`grammar_cache.LIMITS`) apply to
compiling and to each mask, so that a hostile grammar ends with an error after some tens of milliseconds. It is an optional
dependency (`pip install tilewright[structured]`), imported for the first grammar.

The state of a request follows its `output_ids`: each mask first consumes the tokens that have arrived since the last mask. So
nothing has to be undone when a request is preempted, or when a step is dropped.
"""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tilewright.engine.decoding import Newest
from tilewright.engine.grammar import Grammar
from tilewright.engine.grammar_cache import KEPT, GrammarCache, GrammarError, processors, why
from tilewright.engine.mask_times import MaskTimes
from tilewright.engine.request import Request

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ["Constraint", "GrammarError", "Grammars"]

MAX_MASK_S = 0.2
"""Limit on the processor time of the first mask, because the whole batch waits for it. A usual mask takes some milliseconds."""
MISSING = "a grammar needs llguidance, which is not installed: pip install 'tilewright[structured]'"
WRONG_TOKEN = "a token came that the grammar does not allow"


class Constraint:
    """The grammar of one request, and the position of its answer in the grammar. `number`: that of its matcher's original."""

    __slots__ = ("__weakref__", "_begun", "_consumed", "_grammar", "_matcher", "_number")

    def __init__(self, grammar: Grammar, matcher: "LLMatcher", number: int = 0):
        self._grammar = grammar
        self._matcher = matcher
        self._number = number
        self._consumed = 0
        self._begun = not grammar.after

    def advance(self, output_ids: Sequence[int]) -> "LLMatcher | None":
        """The matcher after these tokens; None while any token is allowed. Raises GrammarError."""
        matcher = self._matcher
        while not self._begun and self._consumed < len(output_ids):
            self._consumed += 1
            self._begun = any(_ends(output_ids, self._consumed, ids) for ids in self._grammar.after)
        if not self._begun:
            return None
        new = output_ids[self._consumed :]
        self._consumed = len(output_ids)
        if (new and not matcher.consume_tokens(list(new))) or matcher.is_error():
            raise GrammarError(why(matcher) or WRONG_TOKEN)
        return matcher

    def one_more(self, count: int) -> "LLMatcher | None":
        """The matcher, which the caller then gives one token: the last of `count` output tokens. None if it needs others."""
        if not self._begun or count != self._consumed + 1:
            return None
        self._consumed = count
        return self._matcher

    def agrees(self, output_ids: Sequence[int], drafts: Sequence[int]) -> int:
        """How many of the first `drafts` after these tokens are allowed. Returns 0 before the grammar begins, because it may
        begin after any of the drafts."""
        try:
            matcher = self.advance(output_ids)
        except GrammarError:
            return 0  # the next mask reports the error
        return 0 if matcher is None else matcher.validate_tokens(list(drafts))

    def forced(self, output_ids: Sequence[int], most: int) -> list[int]:
        """Up to `most` tokens after these, for text that the grammar leaves no choice about, as the tokenizer splits it.

        Other tokens can produce the same text, so these tokens are guesses, though nearly always right."""
        try:
            matcher = self.advance(output_ids)
        except GrammarError:
            return []  # the next mask reports the error
        return [] if matcher is None else matcher.compute_ff_tokens()[:most]


def _ends(ids: Sequence[int], stop: int, last: tuple[int, ...]) -> bool:
    return stop >= len(last) and tuple(ids[stop - len(last) : stop]) == last


class _Row(NamedTuple):
    """A request whose grammar fills masks from line `line` on: one, and one for each draft."""

    request: Request
    matcher: "LLMatcher"
    line: int
    drafts: Sequence[int]
    token: int | None
    """The token to consume first; None: it has all its tokens."""

    @property
    def lines(self) -> range:
        return range(self.line, self.line + len(self.drafts) + 1)


class Grammars:
    """Compiles grammars for one vocabulary and fills masks. `compiled` may be called from any thread, `fill` from one.

    Args:
        tokenizer_json: the text of a `tokenizer.json`.
        eos_ids: tokens that end a text, at least one.
        kept: most compiled grammars in the cache; together their sources have at most `KEPT_CHARS` characters.
        threads: number of threads that fill masks; None: 80 % of the processors, at most 32.

    Raises:
        GrammarError: llguidance is missing, does not understand the tokenizer, or there is no end-of-text token.
    """

    def __init__(self, tokenizer_json: str, eos_ids: Sequence[int], *, kept: int = KEPT, threads: int | None = None):
        if not eos_ids:
            raise GrammarError("a grammar needs a model with an end-of-text token; this one has none")
        try:
            import llguidance
        except ImportError:
            raise GrammarError(MISSING) from None
        lib: Any = llguidance
        try:
            tokenizer = lib.LLTokenizer(tokenizer_json, eos_token=list(eos_ids))
        except ValueError as error:
            raise GrammarError(f"llguidance does not understand the model's tokenizer: {str(error)[:200]}") from None
        self._executor = lib.LLExecutor(threads)  # for None it also looks at the limits of a container
        threads = max(1, min(32, processors() * 80 // 100)) if threads is None else threads
        self._cache = GrammarCache(lib, tokenizer, kept=kept, threads=threads)
        self.words = -(-tokenizer.vocab_size // 32)
        """int32 words in a mask."""

    def compiled(self, grammar: Grammar) -> "LLMatcher":
        """A matcher at the beginning of the grammar, cached or compiled now. It is shared: copy it. Raises GrammarError."""
        return self._cache.compiled(grammar).originals[0].matcher

    def known(self, grammar: Grammar) -> bool:
        """Whether the compiled grammar is in the cache."""
        return self._cache.known(grammar)

    def start(self, grammar: Grammar) -> Constraint:
        """A new state for one request, at the beginning of the grammar. Raises GrammarError."""
        original = self._cache.original(grammar)
        constraint = Constraint(grammar, original.matcher.deep_copy(), original.number)
        original.users.add(constraint)
        return constraint

    def check(self, grammar: Grammar) -> None:
        """Compile a grammar and make its first mask; call it in a process that does nothing else. Raises GrammarError."""
        matcher = self.compiled(grammar).deep_copy()
        start_s = time.process_time()
        matcher.compute_bitmask()
        took_s = time.process_time() - start_s
        if matcher.is_error():
            raise GrammarError(f"the {grammar.kind} cannot be followed: {why(matcher)}")
        if took_s > MAX_MASK_S:
            raise GrammarError(f"the {grammar.kind} is too complex: its first mask takes {took_s:.2f} s, wanted {MAX_MASK_S:g}")

    def fill(
        self,
        requests: Sequence[Request],
        constraints: Sequence[Constraint | None],
        bits: np.ndarray,
        drafts: Sequence[Sequence[int]] | None = None,
        *,
        newest: Newest | None = None,
        times: MaskTimes | None = None,
    ) -> list[tuple[Request, str]]:
        """Write the masks of requests into bits [masks, words] int32, C-contiguous.

        Each request has a mask for its next token, followed by one mask for the token after each of its `drafts`, which its
        grammar must allow. A mask allows all tokens if there is no constraint, if it has failed, or before its grammar begins.
        With `newest`, the `output_ids` of a request are read only if they have more new tokens than the last. The seconds are
        added to `times`.

        Returns:
            (request, reason) for each request whose grammar has failed.
        """
        start_s = time.perf_counter()
        rows, free, failed = self._rows(requests, constraints, drafts, newest)
        rows = self._consumed(rows, free, failed)
        committed_s = time.perf_counter()
        # Of the masks of a row with drafts, those after the last possible token are not written.
        free += [line for row in rows if row.drafts for line in row.lines]
        if len(free) == len(bits):
            bits.fill(-1)
        elif free:
            bits[free] = -1
        self._write(rows, bits)
        for row in rows:
            if row.matcher.is_error():
                failed.append((row.request, why(row.matcher)))
                bits[row.lines] = -1
        if times is not None:
            times.commit_s += committed_s - start_s
            times.fill_s += time.perf_counter() - committed_s
            times.masks += len(bits)
        return failed

    @staticmethod
    def _rows(
        requests: Sequence[Request],
        constraints: Sequence[Constraint | None],
        drafts: Sequence[Sequence[int]] | None,
        newest: Newest | None,
    ) -> tuple[list[_Row], list[int], list[tuple[Request, str]]]:
        """(rows to fill, the lines of the others, failed requests)

        Copies of one original wait for each other, and each thread gets neighbouring rows, so the copies are neighbours.
        """
        found: list[tuple[int, int, _Row]] = []
        free: list[int] = []
        failed: list[tuple[Request, str]] = []
        line = 0
        counts, tokens = ([-1] * len(requests), [-1] * len(requests)) if newest is None else newest
        guesses: Sequence[Sequence[int]] = [()] * len(requests) if drafts is None else drafts
        for request, constraint, guessed, count, token in zip(requests, constraints, guesses, counts, tokens, strict=True):
            lines = len(guessed) + 1
            matcher, last = None, None
            if constraint is not None:
                matcher = constraint.one_more(count)
                if matcher is not None:
                    last = token
                else:
                    try:
                        matcher = constraint.advance(request.output_ids)
                    except GrammarError as error:
                        failed.append((request, str(error)))
            if constraint is None or matcher is None:
                free += range(line, line + lines)
            else:
                found.append((constraint._number, line, _Row(request, matcher, line, guessed, last)))
            line += lines
        found.sort()
        return [row for _, _, row in found], free, failed

    def _consumed(self, rows: list[_Row], free: list[int], failed: list[tuple[Request, str]]) -> list[_Row]:
        """Let matchers consume the last token where it is new. Returns the rows that have not failed; adds to the lists."""
        new = [row for row in rows if row.token is not None]
        fine = self._executor.consume_token_par([(row.matcher, row.token) for row in new]) if new else []
        if all(fine):
            return rows
        wrong = {id(row) for row, good in zip(new, fine, strict=True) if not good}
        for row in new:
            if id(row) in wrong:
                failed.append((row.request, why(row.matcher) or WRONG_TOKEN))
                free += row.lines
        return [row for row in rows if id(row) not in wrong]

    def _write(self, rows: list[_Row], bits: np.ndarray) -> None:
        """Fill the masks of rows, in parallel."""
        where = (bits.ctypes.data, 4 * bits.shape[1], bits.shape[0])
        plain = [(row.matcher, row.line) for row in rows if not row.drafts]
        if plain:
            self._executor.unsafe_compute_mask_ptr(plain, *where)
        if len(plain) < len(rows):
            drafted = [(row.matcher, row.line, list(row.drafts)) for row in rows if row.drafts]
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *where)
