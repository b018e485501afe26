"""The fake runner with masks: the next allowed token at or behind the one that it would have drawn, going round.

It holds the engine to the contract of `Runner.sample`: nothing of a masked step runs before, and every step before it
has been run by then.
"""

from collections.abc import Callable

import numpy as np

from tests.engine.fake_runner import FakeRunner, Fault, next_token
from tilewright.engine.request import SamplingParams
from tilewright.engine.step import FillMasks, Step, StepResult


class MaskedRunner(FakeRunner):
    """See the module's text."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.masked: dict[int, tuple[int, ...]] = {}
        self.masks: dict[int, dict[tuple[int, int], np.ndarray]] = {}
        self.flags: dict[tuple[int, int], np.ndarray] = {}
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
        lines = [(i, sample) for i in self.masked.pop(ticket) for sample in range(len(self.queue[0][1][i].drafts) + 1)]
        bits = np.zeros((len(lines), words), np.int32)
        fill(bits)
        flags = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")
        self.masks[ticket] = dict(zip(lines, flags, strict=True))

    def collect(self, ticket: int) -> StepResult:
        """The result of a launch, masks applied."""
        assert ticket not in self.masked, "collected before it was sampled"
        try:
            return super().collect(ticket)
        except Fault:
            self.hurt = True
            raise

    def _run(self) -> None:
        ticket = self.queue[0][0]
        assert ticket not in self.masked, "run before it was sampled"
        self.flags = self.masks.pop(ticket, {})
        super()._run()

    def draw(self, row: int, sample: int, state: int, seed: int) -> int:
        """As the fake runner, but for what the mask forbids."""
        token = super().draw(row, sample, state, seed)
        flags = self.flags.get((row, sample))
        return token if flags is None else allowed_from(token, flags.__getitem__)


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
