"""The cart with a pole (Barto, Sutton and Anderson, 1983), as Gymnasium's CartPole-v1 has it: many at once."""

import torch
from torch import Tensor

LIMIT = 500


class CartPoles:
    """`count` carts. State [count, 4]: position m, speed, angle rad, angular speed. Falling or 500 steps end an episode."""

    def __init__(self, count: int, generator: torch.Generator) -> None:
        self.generator = generator
        self.state = self._fresh(count)
        self.steps = torch.zeros(count, dtype=torch.long)

    def _fresh(self, count: int) -> Tensor:
        return torch.rand(count, 4, generator=self.generator) * 0.1 - 0.05

    def step(self, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Push by 10 N for 0.02 s. Returns the states reached, who fell, who was cut off; those start anew."""
        x, v, angle, spin = self.state.unbind(1)
        sin, cos = angle.sin(), angle.cos()
        # Masses 1 kg and 0.1 kg, half a pole 0.5 m, gravity 9.8; the pole's product of mass and length is 0.05.
        push = (torch.where(right, 10.0, -10.0) + 0.05 * spin**2 * sin) / 1.1
        turn = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        slide = push - 0.05 * turn * cos / 1.1
        reached = torch.stack([x + 0.02 * v, v + 0.02 * slide, angle + 0.02 * spin, spin + 0.02 * turn], dim=1)
        self.steps += 1
        fell = (reached[:, 0].abs() > 2.4) | (reached[:, 2].abs() > 12 * torch.pi / 180)
        cut = (self.steps >= LIMIT) & ~fell
        over = fell | cut
        self.state = torch.where(over[:, None], self._fresh(len(over)), reached)
        self.steps = torch.where(over, 0, self.steps)
        return reached, fell, cut
