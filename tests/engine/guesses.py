"""Proposers for tests over the fake model."""

import random
from collections.abc import Mapping

from tests.engine.fake_runner import next_token
from tilewright.engine.request import Request


class Oracle:
    """Guesses right as often as it is told to: it knows the fake model. Now and then it guesses fewer tokens, or none."""

    def __init__(self, right: float, seed: int = 0, *, free: bool = False, vocab_size: int = 257):
        self.right, self.free, self.rng, self.vocab_size = right, free, random.Random(seed), vocab_size

    def propose(self, asked: Mapping[Request, int]) -> dict[Request, list[int]]:
        """See `Proposer`."""
        found = {}
        for request, most in asked.items():
            tokens = [*request.prompt_ids, *request.output_ids]
            for _ in range(most if self.rng.random() < 0.9 else self.rng.randint(0, most)):
                right = next_token(tuple(tokens), request.seed, self.vocab_size)
                tokens.append(right if self.rng.random() < self.right else self.rng.randrange(self.vocab_size))
            found[request] = tokens[len(request) :]
        return found
