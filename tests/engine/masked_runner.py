"""The fake runner with masks: the next allowed token at or behind the one that it would have drawn, going round.

It holds the engine to the contract of `Runner.sample`: nothing of a masked step runs before, and every step before it
has been run by then.
"""

from collections.abc import Callable

import numpy as np

from tests.engine.fake_runner import FakeRunner, Fault, draw, fold, next_token
from tilewright.engine.request import SamplingParams
from tilewright.engine.step import FillMasks, Step, StepResult


class MaskedRunner(FakeRunner):
    """See the module's text."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.masked: dict[int, tuple[int, ...]] = {}
        self.masks: dict[int, dict[int, np.ndarray]] = {}
        self.hurt = False

    def launch(self, step: Step) -> int:
        """As the fake runner; a step with masked rows waits for `sample`."""
        asynchronous, self.asynchronous = self.asynchronous, self.asynchronous or bool(step.masked)
        try:
            ticket = super().launch(step)
        finally:
            self.asynchronous = asynchronous
        if step.masked:
            self.masked[ticket] = step.masked
        return ticket

    def sample(self, ticket: int, words: int, fill: FillMasks) -> None:
        """Takes the masks of a step."""
        assert ticket == self.launched, "only the last step can wait for its masks"
        while self.queue[0][0] < ticket:
            assert self.hurt, "a step before it has not been run"
            self.masked.pop(self.queue.pop(0)[0], None)  # dropped with the step that failed
        bits = np.zeros((len(self.masked[ticket]), words), np.int32)
        fill(bits)
        flags = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")
        self.masks[ticket] = dict(zip(self.masked.pop(ticket), flags, strict=True))

    def collect(self, ticket: int) -> StepResult:
        """The result of a launch, masks applied."""
        assert ticket not in self.masked, "collected before it was sampled"
        try:
            return super().collect(ticket)
        except Fault:
            self.hurt = True
            raise

    def _run(self) -> None:
        ticket, rows, _ = self.queue[0]
        assert ticket not in self.masked, "run before it was sampled"
        masks = self.masks.pop(ticket, {})
        super()._run()
        tokens = list(self.results[ticket].tokens)
        for i, flags in masks.items():
            token = allowed_from(draw(fold(self._read(1, rows[i])), rows[i].seed, self.vocab_size), flags.__getitem__)
            tokens[i] = self.latest[rows[i].slot] = token
        self.results[ticket] = StepResult(tokens, self.results[ticket].logprobs, self.results[ticket].prompt_logprobs)


def allowed_from(token: int, allowed: Callable[[int], object], vocab_size: int = 257) -> int:
    """The first allowed token from `token` on, going round."""
    return next(t % vocab_size for t in range(token, token + vocab_size) if allowed(t % vocab_size))


def expected_choice(prompt: list[int], texts: list[bytes], params: SamplingParams, seed: int, end: int) -> list[int]:
    """All tokens of an answer that must be one of `texts`, a byte a token; without a grammar library."""
    output = b""
    tokens: list[int] = []
    while len(tokens) < params.max_tokens:
        following = {text[len(output)] if len(text) > len(output) else end for text in texts if text.startswith(output)}
        tokens.append(allowed_from(next_token((*prompt, *tokens), seed, end + 1), following.__contains__, end + 1))
        if tokens[-1] == end:
            break
        output += bytes([tokens[-1]])
    return tokens
