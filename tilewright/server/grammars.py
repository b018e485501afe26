"""Compiles grammars for an engine, off its thread and one after the other: first a trial in a child process, then for use."""

from concurrent.futures import Future, ThreadPoolExecutor

from tilewright.engine.core import Engine
from tilewright.engine.grammar import Grammar
from tilewright.engine.grammar_trial import GrammarTrial

__all__ = ["GrammarCompiler"]


class GrammarCompiler:
    """One thread, which lives from here to `close`, and a child process, from the first grammar on."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tilewright-grammars")
        self._trial: GrammarTrial | None = None

    def submit(self, grammar: Grammar) -> Future[None]:
        """Compile a grammar. The future's error is a `GrammarError` where it is not valid or too complex."""
        return self._thread.submit(self._compile, grammar)

    def _compile(self, grammar: Grammar) -> None:
        grammars = self._engine.grammars
        if grammars.known(grammar):
            return
        if self._trial is None:
            tokenizer = self._engine.tokenizer
            assert tokenizer is not None  # or there were no grammars
            self._trial = GrammarTrial(tokenizer.to_json(), self._engine.eos_ids)
        self._trial.check(grammar)
        grammars.compiled(grammar)

    def close(self) -> None:
        """End the thread, behind what it is in, and the child."""
        self._thread.submit(self._end)
        self._thread.shutdown(wait=False)

    def _end(self) -> None:
        if self._trial is not None:
            self._trial.close()
