"""The package's batch, advantages and PPO loss balance a pole: the formulas learn, not only agree with themselves."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tests.rl.cartpole import LIMIT, CartPoles
from tilewright.rl.advantages import gae, whitened
from tilewright.rl.batch import Batch, Totals, select
from tilewright.rl.losses.ppo import entropy_bonus, ppo, value_loss

CARTS, STEPS, EPOCHS, PARTS = 8, 128, 4, 4
MOST_STEPS = 500_000
WANTED = 475.0


def network(outputs: int, gain: float) -> nn.Sequential:
    """Two hidden layers of 64, orthogonal weights: details 2 and 3 of Huang et al. for PPO on such tasks."""
    layers = [nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)]
    for layer, size in zip(layers[::2], (2**0.5, 2**0.5, gain)):
        nn.init.orthogonal_(layer.weight, size)  # pyright: ignore[reportArgumentType]
        nn.init.zeros_(layer.bias)  # pyright: ignore[reportArgumentType]
    return nn.Sequential(*layers)


def segments(ends: Tensor) -> Tensor:
    """[S]: lengths of the pieces of one cart after the other, up to an episode's end or the rollout's. ends [C, T]."""
    marks = ends.clone()
    marks[:, -1] = True
    places = torch.cat([torch.tensor([-1]), marks.flatten().nonzero()[:, 0]])
    return places.diff()


@torch.no_grad()
def rollout(carts: CartPoles, actor: nn.Module, critic: nn.Module, lengths: list[int]) -> tuple[Batch, Tensor]:
    """128 steps of every cart as a batch of segments with advantages, and the states [T, 4]. Notes episodes' lengths."""
    states, actions, logprobs, values, ends, after = ([] for _ in range(6))
    for _ in range(STEPS):
        state, ages = carts.state, carts.steps.clone()
        spread = torch.log_softmax(actor(state), dim=1)
        action = torch.multinomial(spread.exp(), 1, generator=carts.generator)[:, 0]
        reached, fell, cut = carts.step(action == 1)
        lengths += (ages + 1)[fell | cut].tolist()
        states.append(state)
        actions.append(action)
        logprobs.append(spread.gather(1, action[:, None])[:, 0])
        values.append(critic(state)[:, 0])
        ends.append(fell | cut)
        after.append(torch.where(fell, 0.0, critic(reached)[:, 0]))

    def by_cart(rows: list[Tensor]) -> Tensor:
        return torch.stack(rows, dim=1).flatten(0, 1)

    pieces = segments(torch.stack(ends, dim=1))
    behind = by_cart(after)[pieces.cumsum(0) - 1]
    old, before = by_cart(logprobs), by_cart(values)
    advantages, returns = gae(torch.ones_like(old), before, pieces, behind, gamma=0.99, lam=0.95)
    zeros = torch.zeros_like(pieces)
    batch = Batch(
        tokens=by_cart(actions),
        lengths=pieces,
        mask=torch.ones(len(old), dtype=torch.bool),
        sampled=old,
        old=old,
        rewards=pieces.to(old.dtype),
        groups=zeros,
        versions=zeros,
        truncated=zeros.bool(),
        totals=Totals(tokens=len(old), sequences=len(pieces)),
        advantages=advantages,
        returns=returns,
        values=before,
    )
    return replace(batch, advantages=whitened(batch, advantages)), by_cart(states)


def steps_alone(batch: Batch) -> Batch:
    """Every step as a sequence of its own, so that minibatches can be drawn from all of them."""
    ones = torch.ones_like(batch.tokens)
    zeros = torch.zeros_like(ones)
    return replace(batch, lengths=ones, rewards=batch.old, groups=zeros, versions=zeros, truncated=zeros.bool())


def steps_until_balanced(seed: int, *, shuffled: bool = False, most: int = MOST_STEPS) -> tuple[int, float]:
    """Steps until the last 100 episodes lasted 475 on average, and the best such average. shuffled: of wrong advantages."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    carts, actor, critic = CartPoles(CARTS, generator), network(2, 0.01), network(1, 1.0)
    weights = [*actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(weights, lr=2.5e-4 * 4, eps=1e-5)
    lengths: list[int] = []
    best, updates = 0.0, most // (CARTS * STEPS)
    for update in range(updates):
        optimizer.param_groups[0]["lr"] = 1e-3 * (1 - update / updates)
        batch, states = rollout(carts, actor, critic, lengths)
        batch = steps_alone(batch)
        if shuffled:
            order = torch.randperm(len(states), generator=generator)
            batch = replace(batch, advantages=batch.known("advantages")[order])
        for _ in range(EPOCHS):
            for kept in torch.randperm(len(states), generator=generator).chunk(PARTS):
                part = replace(select(batch, kept), totals=Totals(tokens=len(kept), sequences=len(kept)))
                spread = torch.log_softmax(actor(states[kept]), dim=1)
                entropies = -(spread.exp() * spread).sum(dim=1)
                loss = ppo(spread.gather(1, part.tokens[:, None])[:, 0], part) + entropy_bonus(entropies, part, 0.01)
                loss = loss + 0.5 * value_loss(critic(states[kept])[:, 0], part)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(weights, 0.5)
                optimizer.step()
        if len(lengths) >= 100:
            best = max(best, sum(lengths[-100:]) / 100)
        if best >= WANTED:
            return (update + 1) * CARTS * STEPS, best
    return most, best


def test_segments_end_where_episodes_do() -> None:
    ends = torch.tensor([[False, True, False, False], [False, False, False, True]])
    assert segments(ends).tolist() == [2, 2, 4]


def test_the_cart_moves_as_gymnasium_documents() -> None:
    # From rest at 0, a push of 10 N: the equations of the documentation by hand.
    carts = CartPoles(2, torch.Generator().manual_seed(0))
    carts.state = torch.zeros(2, 4)
    reached, fell, cut = carts.step(torch.tensor([True, False]))
    spin = 0.02 * (-10 / 1.1) / (0.5 * (4 / 3 - 0.1 / 1.1))
    speed = 0.02 * (10 / 1.1 - 0.05 * (spin / 0.02) / 1.1)
    assert reached[0].tolist() == pytest.approx([0, speed, 0, spin], rel=1e-5)
    assert reached[1].tolist() == pytest.approx([0, -speed, 0, -spin], rel=1e-5)
    assert not fell.any()
    assert not cut.any()


def test_a_few_updates_improve() -> None:
    trained = steps_until_balanced(0, most=30_000)[1]
    assert trained > 60  # random pushes last 22 steps


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(3))
def test_ppo_balances_the_pole(seed: int) -> None:
    steps, best = steps_until_balanced(seed)
    print(f"seed {seed}: {best:.1f} of {LIMIT} after {steps:,} steps")
    assert best >= WANTED


@pytest.mark.long
def test_shuffled_advantages_do_not_learn() -> None:
    assert steps_until_balanced(0, shuffled=True, most=100_000)[1] < 100
