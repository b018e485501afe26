"""What the grammars of an engine's requests say to whoever guesses ahead: which guesses are allowed, and what is forced.

Between two places where an answer may go this way or that, a JSON schema leaves one text, such as the name of a field. Its
tokens are tried like drafts: in one step, each with its mask, so that an answer is the same with and without.
"""

from collections.abc import Mapping, Sequence

from tilewright.engine.grammar_masks import Constraint
from tilewright.engine.request import Request

__all__ = ["FromGrammar", "Rules"]


class Rules:
    """The grammars of requests, as the engine keeps them. A request without one may say anything."""

    def __init__(self, constraints: Mapping[Request, Constraint]):
        self._constraints = constraints

    def allowed(self, request: Request, drafts: Sequence[int]) -> int:
        """How many of a request's drafts its grammar allows."""
        constraint = self._constraints.get(request)
        return len(drafts) if constraint is None else constraint.agrees(request.output_ids, drafts)

    def forced(self, request: Request, most: int) -> list[int]:
        """Up to `most` tokens that the grammar of a request leaves no choice about."""
        constraint = self._constraints.get(request)
        return [] if constraint is None or most <= 0 else constraint.forced(request.output_ids, most)


class FromGrammar:
    """Proposes nothing: what grammars force is all that is tried."""

    free = True

    def propose(self, asked: Mapping[Request, int]) -> dict[Request, list[int]]:
        """See `Proposer`."""
        return {}
