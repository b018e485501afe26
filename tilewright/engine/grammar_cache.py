"""Compiled grammars, and the matchers from which the states of requests are copied.

All copies of an `LLMatcher` share one lexer. A lock protects it while a copy consumes a token or fills a mask, so copies of one
matcher are served one after the other, with any number of threads. A grammar that many requests follow is therefore compiled
several times: into several originals, each of which is copied for a few requests.
"""

import os
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from tilewright.engine.grammar import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ["KEPT", "Compiled", "GrammarCache", "GrammarError", "Original", "processors", "why"]

KEPT = 128
"""Number of compiled grammars in the cache; each takes some 10 kB to 10 MB."""
KEPT_CHARS = 1 << 21
TOGETHER = 4
"""If each original of a grammar is used by this many unfinished requests, another one is compiled."""
MOST_ORIGINALS = 512
"""Limit on the number of originals of all grammars together, without the first of each."""
AT_ONCE_S = 0.002
"""Further originals of a grammar that takes longer to compile are compiled in a thread of their own; requests that start
meanwhile share those that exist."""
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


class GrammarError(ValueError):
    """A grammar is not valid, is too complex, or cannot be followed with this model."""


@dataclass(eq=False, slots=True)
class Original:
    """A matcher at the beginning of a grammar, to be copied."""

    matcher: "LLMatcher"
    number: int
    """Unique in its cache."""
    users: "WeakSet[Any]" = field(default_factory=WeakSet)
    """The states of requests whose matchers are copies of this one."""


@dataclass(eq=False, slots=True)
class Compiled:
    """A grammar in the cache."""

    text: str
    """In llguidance's own form."""
    originals: list[Original]
    most: int
    """Largest number of originals."""
    took_s: float
    """The shortest time that compiling `text` has taken."""
    busy: bool = False
    """A thread is compiling further originals."""

    @property
    def least_used(self) -> Original:
        """The original with the fewest users."""
        return min(list(self.originals), key=lambda one: len(one.users))


class GrammarCache:
    """Compiles grammars for one tokenizer. May be used from any thread.

    Args:
        lib: the module llguidance.
        tokenizer: its `LLTokenizer`.
        kept: most grammars in the cache; together their sources have at most `KEPT_CHARS` characters.
        threads: number of threads that fill masks.
    """

    def __init__(self, lib: Any, tokenizer: Any, *, kept: int, threads: int):
        self._lib, self._tokenizer, self._most = lib, tokenizer, kept
        self._limits = lib.LLParserLimits(**LIMITS)
        # Twice as many as threads: two threads then seldom have neighbouring rows of one original.
        self._most_originals = 1 if threads == 1 else 2 * threads
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, str], Compiled] = OrderedDict()
        self._made = 0

    def compiled(self, grammar: Grammar) -> Compiled:
        """The grammar, cached or compiled now. Raises GrammarError."""
        key = (grammar.kind, grammar.source)
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                return found
        made = self._compile(grammar)
        with self._lock:
            made = self._kept.setdefault(key, made)  # another thread may have been faster
            while len(self._kept) > self._most or sum(len(source) for _, source in self._kept) > KEPT_CHARS:
                self._kept.popitem(last=False)
        return made

    def known(self, grammar: Grammar) -> bool:
        """Whether the compiled grammar is in the cache."""
        with self._lock:
            return (grammar.kind, grammar.source) in self._kept

    def original(self, grammar: Grammar) -> Original:
        """An original for one more request, which the caller adds to its users. Raises GrammarError."""
        compiled = self.compiled(grammar)
        found = compiled.least_used
        if len(found.users) < TOGETHER or len(compiled.originals) >= compiled.most or compiled.busy:
            return found
        if compiled.took_s > AT_ONCE_S:
            compiled.busy = True
            threading.Thread(target=self._add_originals, args=(compiled,), name="tilewright-originals").start()
            return found
        return self._add_original(compiled) or found

    def _add_originals(self, compiled: Compiled) -> None:
        """Compile originals until there are enough for the present requests; stop if the program ends."""
        try:
            while len(compiled.originals) < compiled.most and len(compiled.least_used.users) >= TOGETHER:
                if not threading.main_thread().is_alive() or self._add_original(compiled) is None:
                    break
        finally:
            compiled.busy = False

    def _add_original(self, compiled: Compiled) -> Original | None:
        """Compile another original; None if there is no room for it."""
        with self._lock:
            if self._others() >= MOST_ORIGINALS:
                for one in self._kept.values():
                    one.originals[1:] = [original for original in one.originals[1:] if original.users]
                if self._others() >= MOST_ORIGINALS:
                    return None
        matcher, took_s = self._matcher(compiled.text)
        compiled.took_s = min(compiled.took_s, took_s)
        made = self._original(matcher)
        compiled.originals.append(made)
        return made

    def _others(self) -> int:
        return sum(len(one.originals) - 1 for one in self._kept.values())

    def _compile(self, grammar: Grammar) -> Compiled:
        matcher_of, source = self._lib.LLMatcher, grammar.source
        try:
            if grammar.kind == "json_schema":
                text = matcher_of.grammar_from_json_schema(source, defaults={"whitespace_pattern": WHITESPACE})
            elif grammar.kind == "regex":
                text = matcher_of.grammar_from_regex(source)
            else:
                text = matcher_of.grammar_from_lark(_as_lark(source))
            matcher, took_s = self._matcher(text)
        except (ValueError, LookupError, RecursionError) as error:  # what the converters raise
            raise GrammarError(f"the {grammar.kind} is not valid: {str(error)[:300]}") from None
        if matcher.is_error():
            raise GrammarError(f"the {grammar.kind} is not valid: {why(matcher)}")
        most = max(1, min(self._most_originals, KEPT_CHARS // len(source)))
        return Compiled(text, [self._original(matcher)], most, took_s)

    def _matcher(self, text: str) -> tuple["LLMatcher", float]:
        """(a matcher at the beginning of a grammar, the seconds that compiling it took)"""
        start_s = time.perf_counter()
        matcher = self._lib.LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
        return matcher, time.perf_counter() - start_s

    def _original(self, matcher: "LLMatcher") -> Original:
        with self._lock:
            self._made += 1
            return Original(matcher, self._made)


def _as_lark(source: str) -> str:
    """Converts a grammar in Lark or GBNF to Lark. Raises ValueError."""
    from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

    try:
        return any_to_lark(source)
    except GbnfToLarkError as error:  # a plain Exception
        raise ValueError(" ".join(str(error).split())) from None


def why(matcher: "LLMatcher") -> str:
    """The reason why a matcher has failed, in one line."""
    words = " ".join(matcher.get_error().split())
    return words if len(words) <= 300 else words[:297] + "..."


def processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
