"""A failing scenario made smaller: fewer clients, fewer faults, plainer requests, while it still fails."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.simulation.scenario import Client, Scenario

__all__ = ["shrink"]


def _plainer(client: Client) -> Iterator[Client]:
    """The client with one thing less."""
    for name in client.params:
        if name not in ("seed", "max_tokens"):
            yield replace(client, params={key: value for key, value in client.params.items() if key != name})
    if client.params["max_tokens"] > 1:
        fewer = client.params["max_tokens"] // 2
        least = min(client.params.get("min_tokens", 0), fewer)
        yield replace(client, params=client.params | {"max_tokens": fewer} | ({"min_tokens": least} if least else {}))
    if client.read_s:
        yield replace(client, read_s=0.0)
    if client.leaves_after is not None:
        yield replace(client, leaves_after=None)
    if client.cancelled_at_s is not None:
        yield replace(client, cancelled_at_s=None)
    for place, prompt in enumerate(client.prompts):
        if len(client.prompts) > 1:
            yield replace(client, prompts=client.prompts[:place] + client.prompts[place + 1 :])
        if len(prompt) > 1:
            yield replace(client, prompts=(*client.prompts[:place], prompt[: len(prompt) // 2], *client.prompts[place + 1 :]))


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Scenarios with less in them, the ones that lose most first."""
    clients, faults = scenario.clients, scenario.faults
    size = len(clients) // 2
    while size:
        for start in range(0, len(clients), size):
            yield replace(scenario, clients=clients[:start] + clients[start + size :])
        size //= 2
    for place in range(len(faults)):
        yield replace(scenario, faults=faults[:place] + faults[place + 1 :])
    for place in range(len(scenario.row_faults)):
        yield replace(scenario, row_faults=scenario.row_faults[:place] + scenario.row_faults[place + 1 :])
    if scenario.max_wait_s is not None:
        yield replace(scenario, max_wait_s=None)
    if scenario.lethal is not None:
        yield replace(scenario, lethal=None)
    if scenario.asynchronous:
        yield replace(scenario, asynchronous=False)
    for place, client in enumerate(clients):
        for plain in _plainer(client):
            yield replace(scenario, clients=(*clients[:place], plain, *clients[place + 1 :]))


def shrink(scenario: Scenario, fails: Callable[[Scenario], bool], tries: int = 800) -> Scenario:
    """The smallest scenario that was found to fail.

    Args:
        scenario: fails.
        fails: whether one does.
        tries: runs at most.
    """
    while True:
        for smaller in _smaller(scenario):
            tries -= 1
            if tries < 0:
                return scenario
            if smaller.clients and fails(smaller):
                scenario = smaller
                break
        else:
            return scenario
