"""Compiles grammars for an engine in a separate thread, one after the other: first as a trial in a child process, then for
use."""

from concurrent.futures import Future, ThreadPoolExecutor

from tilewright.engine.core import Engine
from tilewright.engine.grammar import Grammar
from tilewright.engine.grammar_trial import GrammarTrial

__all__ = ["GrammarCompiler"]


class GrammarCompiler:
    """Compiles grammars in one thread, which runs until `close`. A child process for trials starts with the first grammar."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tilewright-grammars")
        self._trial: GrammarTrial | None = None

    def submit(self, grammar: Grammar) -> Future[None]:
        """Compile a grammar. The future raises `GrammarError` if the grammar is invalid or too complex."""
        return self._thread.submit(self._compile, grammar)

    def _compile(self, grammar: Grammar) -> None:
        grammars = self._engine.grammars
        if grammars.known(grammar):
            return
        if self._trial is None:
            tokenizer = self._engine.tokenizer
            assert tokenizer is not None  # without a tokenizer the engine has no grammars
            self._trial = GrammarTrial(tokenizer.to_json(), self._engine.eos_ids)
        self._trial.check(grammar)
        grammars.compiled(grammar)

    def close(self) -> None:
        """End the thread after its current and queued work, and then the child process."""
        self._thread.submit(self._end)
        self._thread.shutdown(wait=False)

    def _end(self) -> None:
        if self._trial is not None:
            self._trial.close()
