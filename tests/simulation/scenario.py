"""What happens in one simulated episode, as plain values: drawn from a seed, written as JSON, made smaller, run again.

A scenario holds the sizes of the engine, what each client asks for and when it goes away, and the steps and rows that fail. All
that is decided while it runs (which thread goes first) comes from its own seed too, so the same scenario is the same run.
"""

import json
import random
from dataclasses import asdict, dataclass, replace
from typing import Any

__all__ = ["VOCAB", "Client", "Scenario", "draw_scenario", "from_json", "to_json"]

VOCAB = 257
"""Bytes, and one token that ends a text."""
_STOPS = ("a", "é", "\ufffd\ufffd", "  ", "b\n", "Q", "z9")


@dataclass(frozen=True, kw_only=True)
class Client:
    """One HTTP request, which may be several prompts with several samples each."""

    at_s: float
    """When it arrives."""
    prompts: tuple[tuple[int, ...], ...]
    params: dict[str, Any]
    """Fields of `SamplingParams`."""
    read_s: float = 0.0
    """How long it takes over each read: a slow reader."""
    leaves_after: int | None = None
    """It goes away after so many reads; None: it stays to the end."""
    cancelled_at_s: float | None = None
    """It is cut off at that time, wherever it stands, even before its prompts are submitted."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One episode."""

    seed: int
    """Decides the interleaving of the engine's thread and the event loop."""
    pages: int
    page_size: int
    max_seqs: int
    budget: int
    chunk: int | None
    max_waiting: int
    prefix_cache: bool
    asynchronous: bool
    clients: tuple[Client, ...]
    faults: tuple[int, ...] = ()
    """Launches that raise; negative: collections that do."""
    lethal: int | None = None
    """A launch that raises what no runner may raise: the engine stops for good."""
    row_faults: tuple[int, ...] = ()
    """Launches that one of their rows, as the number says, makes impossible."""
    max_wait_s: float | None = None
    """How long a request may wait for its start; None: for ever."""
    window: int | None = None
    """Tokens that some layers see, which then have pages of their own; None: all layers have the same."""
    window_pages: int = 0
    """More pages for these than one request needs."""
    host_pages: int = 0
    """Pages of host memory behind the prefix cache."""
    guesses: float | None = None
    """Tokens are guessed ahead, and this share of them is right; None: nothing is guessed."""
    silent: bool = False
    """They are guessed in silence first."""


def _prompt(rng: random.Random, longest: int) -> tuple[int, ...]:
    """Tokens that often begin as those of others do."""
    stem = [(7 * kind + 3 * i) % 250 for kind in (rng.randrange(3),) for i in range(rng.choice((0, 4, 8, 16, 17, 32)))]
    tail = [rng.randrange(40, 44) for _ in range(rng.randint(0 if stem else 1, longest))]
    return tuple([*stem, *tail][:longest])


def _params(rng: random.Random) -> dict[str, Any]:
    """Sampling parameters; each special one in a share of the requests."""
    params: dict[str, Any] = {"max_tokens": rng.choice((1, 2, 5, 12, 30, 60)), "seed": rng.randrange(5)}
    extras = {
        "n": rng.randint(2, 3),
        "min_tokens": rng.randint(1, params["max_tokens"]),
        "ignore_eos": True,
        "stop": tuple(rng.sample(_STOPS, rng.randint(1, 2))),
        "stop_token_ids": tuple(range(start := rng.randrange(200), start + 20)),
        "presence_penalty": 0.5,
        "logprobs": rng.randint(0, 2),
        "prompt_logprobs": 0,
        "priority": rng.randint(0, 3),
    }
    return params | {name: value for name, value in extras.items() if rng.random() < 0.2}


def _client(rng: random.Random, span_s: float, longest: int) -> Client:
    prompts = tuple(_prompt(rng, longest) for _ in range(rng.choice((1, 1, 1, 2))))
    at_s = round(rng.uniform(0, span_s), 2)
    return Client(
        at_s=at_s,
        prompts=prompts,
        params=_params(rng),
        read_s=rng.choice((0.0, 0.0, 0.0, 0.7, 9.0)),
        leaves_after=rng.randint(0, 6) if rng.random() < 0.15 else None,
        cancelled_at_s=round(at_s + rng.expovariate(0.1), 2) if rng.random() < 0.15 else None,
    )


def draw_scenario(seed: int) -> Scenario:
    """The scenario of a seed: a small engine, mostly with too few pages, and up to 40 clients."""
    rng = random.Random(seed)
    size = rng.choice((1, 4, 4, 16))
    pages = rng.choice((48, 80, 130, 400)) // size
    max_seqs = rng.randint(1, 8)
    clients = rng.randint(1, 40)
    span_s = rng.choice((1.0, 30.0, 200.0))
    return Scenario(
        seed=seed,
        pages=pages,
        page_size=size,
        max_seqs=max_seqs,
        budget=max_seqs + rng.choice((0, 3, 20, 100)),
        chunk=rng.choice((None, None, 3, 16)),
        max_waiting=rng.choice((2, 20, 1000)),
        prefix_cache=rng.random() < 0.8,
        asynchronous=rng.random() < 0.7,
        clients=tuple(_client(rng, span_s, rng.choice((8, 40, 90))) for _ in range(clients)),
        faults=tuple(rng.choice((1, -1)) * rng.randint(1, 120) for _ in range(rng.choice((0, 0, 1, 4)))),
        lethal=rng.randint(1, 150) if rng.random() < 0.05 else None,
        row_faults=tuple(rng.randint(1, 120) for _ in range(rng.choice((0, 0, 1, 4)))),
        max_wait_s=rng.choice((None, None, 2.0, 20.0)),
        guesses=rng.choice((None, 0.1, 0.6, 0.9, 1.0)),
        silent=rng.random() < 0.5,
        host_pages=rng.choice((0, 2, 20, 400)) // size,
        # Drawn last, so that a seed's episode stays what it was beside these.
        window=rng.choice((None, None, 1, 3, 8, 20, 50)),
        window_pages=rng.choice((0, 1, 8, 100)),
    )


def to_json(scenario: Scenario) -> str:
    """One line that `from_json` reads."""
    return json.dumps(asdict(scenario))


def from_json(text: str) -> Scenario:
    """The scenario that `to_json` wrote."""
    data = json.loads(text)
    clients = tuple(_client_of(client) for client in data.pop("clients"))
    return replace(Scenario(clients=clients, **data), faults=tuple(data["faults"]), row_faults=tuple(data["row_faults"]))


def _client_of(data: dict[str, Any]) -> Client:
    params = {key: tuple(value) if isinstance(value, list) else value for key, value in data.pop("params").items()}
    prompts = tuple(tuple(prompt) for prompt in data.pop("prompts"))
    return Client(prompts=prompts, params=params, **data)
