"""The samplers of a run that has some in processes of their own, on one device or several of this machine.

Each gets a part of a call's prompts. What is drawn depends on a prompt's place in the whole call, so a run does not depend on
how many samplers it has, but for rounding.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tilewright.models import Model
from tilewright.rl.config import RLConfig
from tilewright.rl.remote import RemoteSampler
from tilewright.rl.rollout import Answer, Samples
from tilewright.rl.shared_weights import SharedWeights

__all__ = ["RemoteSamplers", "dealt"]


class RemoteSamplers:
    """A process on each device that `config.sampler` names. The weights of `model` lie once in memory that all share.

    longest: tokens of a conversation.

    Raises:
        ConnectionError: one ends before it is ready.
    """

    def __init__(self, config: RLConfig, model: Model, longest: int) -> None:
        self.weights = SharedWeights(model)
        self.samplers: list[RemoteSampler] = []
        try:
            self.push(0)
            for device in config.sampler_devices:
                self.samplers.append(RemoteSampler(config, device, self.weights, longest))
            for sampler in self.samplers:
                sampler.wait()
        except BaseException:
            self.close()
            raise

    def push(self, version: int) -> dict[str, float]:
        """Write the model's weights into the shared memory."""
        return self.weights.push(version)

    def __call__(
        self, prompts: Sequence[Sequence[int]], *, answers: int, max_tokens: int, seed: int, places: Sequence[int] | None = None
    ) -> list[list[Answer]]:
        """As `Sampler` does, by all of them at once. Raises ConnectionError where one has ended."""
        return dealt(self.samplers, prompts, answers=answers, max_tokens=max_tokens, seed=seed, places=places)

    def close(self) -> None:
        """End the processes and free the shared memory."""
        for sampler in self.samplers:
            sampler.close()
        self.weights.close()


def dealt(
    samplers: Sequence[Samples], prompts: Sequence[Sequence[int]], *, answers: int, max_tokens: int, seed: int,
    places: Sequence[int] | None,
) -> list[list[Answer]]:  # fmt: skip
    """The answers to all prompts in their order, from samplers that work at the same time on equal shares of them."""
    whole = [index * answers for index in range(len(prompts))] if places is None else list(places)
    count = len(samplers)
    cuts = [len(prompts) * place // count for place in range(count + 1)]

    def part(place: int) -> list[list[Answer]]:
        mine = slice(cuts[place], cuts[place + 1])
        if not prompts[mine]:
            return []
        return samplers[place](prompts[mine], answers=answers, max_tokens=max_tokens, seed=seed, places=whole[mine])

    if count == 1:
        return part(0)
    with ThreadPoolExecutor(count) as pool:
        return [group for some in pool.map(part, range(count)) for group in some]
