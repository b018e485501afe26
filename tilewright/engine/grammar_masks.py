"""Grammars, compiled by llguidance. Before each sample they fill a mask of the tokens that may come next, one bit per token.

llguidance walks the tree of the vocabulary with a lexer and an Earley parser. Its work limits (`LIMITS`) apply to compiling and
to each mask, so that a hostile grammar ends with an error after some tens of milliseconds. It is an optional dependency
(`pip install tilewright[structured]`), imported for the first grammar.

The state of a request follows its `output_ids`: each mask first consumes the tokens that have arrived since the last mask. So
nothing has to be undone when a request is preempted, or when a step is dropped.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.engine.grammar import Grammar
from tilewright.engine.request import Request

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ["Constraint", "GrammarError", "Grammars"]

KEPT = 128
"""Number of compiled grammars in the cache; each takes some 10 kB to 10 MB."""
KEPT_CHARS = 1 << 21
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 100_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,24}"
"""Allowed white space between two JSON tokens, unless the schema's `x-guidance` overrides it. Without a limit, a small model
might never stop."""
MAX_MASK_S = 0.2
"""Limit on the processor time of the first mask, because the whole batch waits for it. A usual mask takes some milliseconds."""
MISSING = "a grammar needs llguidance, which is not installed: pip install 'tilewright[structured]'"


class GrammarError(ValueError):
    """A grammar is not valid, is too complex, or cannot be followed with this model."""


class Constraint:
    """The grammar of one request, and the position of its answer in the grammar."""

    __slots__ = ("_begun", "_consumed", "_grammar", "_matcher")

    def __init__(self, grammar: Grammar, matcher: "LLMatcher"):
        self._grammar = grammar
        self._matcher = matcher
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
            raise GrammarError(_why(matcher) or "a token came that the grammar does not allow")
        return matcher

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
        self._lib: Any = llguidance
        try:
            self._tokenizer = llguidance.LLTokenizer(tokenizer_json, eos_token=list(eos_ids))
        except ValueError as error:
            raise GrammarError(f"llguidance does not understand the model's tokenizer: {str(error)[:200]}") from None
        self._limits = llguidance.LLParserLimits(**LIMITS)
        self._executor = llguidance.LLExecutor(threads)
        self.words = -(-self._tokenizer.vocab_size // 32)
        """int32 words in a mask."""
        self._lock = threading.Lock()
        self._most = kept
        self._kept: OrderedDict[tuple[str, str], Any] = OrderedDict()

    def compiled(self, grammar: Grammar) -> "LLMatcher":
        """A matcher at the beginning of the grammar, cached or compiled now. It is shared: copy it. Raises GrammarError."""
        key = (grammar.kind, grammar.source)
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                return found
        matcher = self._compile(grammar)
        with self._lock:
            self._kept[key] = matcher
            while len(self._kept) > self._most or sum(len(source) for _, source in self._kept) > KEPT_CHARS:
                self._kept.popitem(last=False)
        return matcher

    def known(self, grammar: Grammar) -> bool:
        """Whether the compiled grammar is in the cache."""
        with self._lock:
            return (grammar.kind, grammar.source) in self._kept

    def start(self, grammar: Grammar) -> Constraint:
        """A new state for one request, at the beginning of the grammar. Raises GrammarError."""
        return Constraint(grammar, self.compiled(grammar).deep_copy())

    def check(self, grammar: Grammar) -> None:
        """Compile a grammar and make its first mask; call it in a process that does nothing else. Raises GrammarError."""
        matcher = self.compiled(grammar).deep_copy()
        start_s = time.process_time()
        matcher.compute_bitmask()
        took_s = time.process_time() - start_s
        if matcher.is_error():
            raise GrammarError(f"the {grammar.kind} cannot be followed: {_why(matcher)}")
        if took_s > MAX_MASK_S:
            raise GrammarError(f"the {grammar.kind} is too complex: its first mask takes {took_s:.2f} s, wanted {MAX_MASK_S:g}")

    def fill(
        self,
        requests: Sequence[Request],
        constraints: Sequence[Constraint | None],
        bits: np.ndarray,
        drafts: Sequence[Sequence[int]] | None = None,
    ) -> list[tuple[Request, str]]:
        """Write the masks of requests into bits [masks, words] int32, C-contiguous.

        Each request has a mask for its next token, followed by one mask for the token after each of its `drafts`, which its
        grammar must allow. A mask allows all tokens if there is no constraint, if it has failed, or before its grammar begins.

        Returns:
            (request, reason) for each request whose grammar has failed.
        """
        bits.fill(-1)
        failed: list[tuple[Request, str]] = []
        asked: list[tuple[LLMatcher, int, list[int]]] = []
        owners: list[Request] = []
        line = 0
        for i, (request, constraint) in enumerate(zip(requests, constraints, strict=True)):
            guessed = [] if drafts is None else list(drafts[i])
            try:
                matcher = constraint and constraint.advance(request.output_ids)
            except GrammarError as error:
                failed.append((request, str(error)))
                matcher = None
            if matcher is not None:
                asked.append((matcher, line, guessed))
                owners.append(request)
            line += len(guessed) + 1
        where = (bits.ctypes.data, 4 * bits.shape[1], bits.shape[0])
        plain = [(matcher, line) for matcher, line, guessed in asked if not guessed]
        if plain:
            self._executor.unsafe_compute_mask_ptr(plain, *where)
        if len(plain) < len(asked):
            self._executor.unsafe_compute_mask_ptr_with_draft_token([one for one in asked if one[2]], *where)
        for request, (matcher, line, guessed) in zip(owners, asked, strict=True):
            if matcher.is_error():
                failed.append((request, _why(matcher)))
                bits[line : line + len(guessed) + 1] = -1
        return failed

    def _compile(self, grammar: Grammar) -> Any:
        matcher_of, source = self._lib.LLMatcher, grammar.source
        try:
            if grammar.kind == "json_schema":
                text = matcher_of.grammar_from_json_schema(source, defaults={"whitespace_pattern": WHITESPACE})
            elif grammar.kind == "regex":
                text = matcher_of.grammar_from_regex(source)
            else:
                text = matcher_of.grammar_from_lark(_as_lark(source))
            matcher = matcher_of(self._tokenizer, text, log_level=0, limits=self._limits)
        except (ValueError, LookupError, RecursionError) as error:  # what the converters raise
            raise GrammarError(f"the {grammar.kind} is not valid: {str(error)[:300]}") from None
        if matcher.is_error():
            raise GrammarError(f"the {grammar.kind} is not valid: {_why(matcher)}")
        return matcher


def _as_lark(source: str) -> str:
    """Converts a grammar in Lark or GBNF to Lark. Raises ValueError."""
    from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

    try:
        return any_to_lark(source)
    except GbnfToLarkError as error:  # a plain Exception
        raise ValueError(" ".join(str(error).split())) from None


def _why(matcher: "LLMatcher") -> str:
    words = " ".join(matcher.get_error().split())
    return words if len(words) <= 300 else words[:297] + "..."
