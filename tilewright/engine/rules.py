"""Grammars for speculative decoding: which guessed tokens are allowed, and which tokens are forced.

Between two places where an answer has a choice, a JSON schema allows only one text, such as the name of a field. The tokens of
this text are tried like drafts: in one step, each with its mask. So an answer is the same with and without speculation.
"""

from collections.abc import Mapping, Sequence

from tilewright.engine.grammar_masks import Constraint
from tilewright.engine.request import Request

__all__ = ["FromGrammar", "Rules"]


class Rules:
    """The grammars of the engine's requests. A request without a grammar may generate any token."""

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
    """Proposes nothing, so that only tokens forced by grammars are tried."""

    free = True

    def propose(self, asked: Mapping[Request, int]) -> dict[Request, list[int]]:
        """See `Proposer`."""
        return {}
