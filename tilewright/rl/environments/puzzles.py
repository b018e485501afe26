"""Generated tasks that need no data: addition, sorting, reversal, countdown. The reward is 1.0 or 0.0; `Reversal` with
`partial` also gives rewards in between.

A task depends only on its seed, so training and test sets are ranges of seeds. Prompts and answers have only a few characters.
`solution` returns a right answer, for pretraining.
"""

import ast
import operator
import random
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

from tilewright.rl.environments.base import Task

__all__ = ["Addition", "Countdown", "Reversal", "Sorting", "value_of"]

_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_SIGNS = {operator.add: "+", operator.sub: "-", operator.mul: "*", operator.truediv: "/"}
_LONGEST = 200


class _Exact:
    """Tasks with exactly one right answer, `data["answer"]`."""

    def score(self, task: Task, answer: str) -> float:
        """1.0 for the right answer, else 0.0. Spaces around the answer are ignored."""
        return float(answer.strip() == task.data["answer"])

    def solution(self, task: Task) -> str:
        """The right answer."""
        return task.data["answer"]


def _digits(rng: random.Random, count: int) -> str:
    return "".join(rng.choices("0123456789", k=count))


@dataclass(frozen=True, kw_only=True)
class Reversal(_Exact):
    """ "1234=" is answered by "4321". partial: if not 0, an answer of the right length scores its share of right digits."""

    digits: int = 4
    partial: int = 0

    def task(self, seed: int) -> Task:
        """Random digits."""
        text = _digits(random.Random(seed), self.digits)
        return Task(prompt=f"{text}=", data={"answer": text[::-1]})

    def score(self, task: Task, answer: str) -> float:
        """1.0 for the right answer; with `partial`, less for a partly right one."""
        wanted, said = task.data["answer"], answer.strip()
        if not self.partial or len(said) != len(wanted):
            return super().score(task, answer)
        return sum(a == b for a, b in zip(wanted, said)) / len(wanted)


@dataclass(frozen=True, kw_only=True)
class Sorting(_Exact):
    """ "3142<" is answered by "1234"."""

    digits: int = 6

    def task(self, seed: int) -> Task:
        """Digits in a random order, some repeated."""
        text = _digits(random.Random(seed), self.digits)
        return Task(prompt=f"{text}<", data={"answer": "".join(sorted(text))})


@dataclass(frozen=True, kw_only=True)
class Addition(_Exact):
    """ "17+5=" is answered by "22"."""

    digits: int = 3

    def task(self, seed: int) -> Task:
        """Two numbers with up to `digits` digits; all lengths are equally likely."""
        rng = random.Random(seed)
        a, b = (rng.randrange(10 ** rng.randint(1, self.digits)) for _ in range(2))
        return Task(prompt=f"{a}+{b}=", data={"answer": str(a + b)})


@dataclass(frozen=True, kw_only=True)
class Countdown:
    """ "3 7 50: 71=" is answered by "50+3*7". Every number must be used once, with + - * / and brackets. Every task has a
    solution."""

    numbers: int = 3
    largest: int = 50

    def task(self, seed: int) -> Task:
        """Some numbers, and a target from 1 to 999 that can be reached with some order of the numbers and some operators."""
        rng = random.Random(seed)
        while True:
            given = [rng.randint(1, self.largest) for _ in range(self.numbers)]
            value, written, sign = Fraction(given[0]), str(given[0]), "*"
            for number in rng.sample(given[1:], self.numbers - 1):
                before, step = sign, rng.choice((operator.add, operator.sub, operator.mul, operator.truediv))
                value, sign = step(value, number), _SIGNS[step]
                written = f"({written}){sign}{number}" if before in "+-" and sign in "*/" else f"{written}{sign}{number}"
            if value.denominator == 1 and 1 <= value <= 999:
                shown = rng.sample(given, self.numbers)
                data = {"numbers": given, "target": int(value), "solution": written}
                return Task(prompt=f"{' '.join(map(str, shown))}: {value}=", data=data)

    def solution(self, task: Task) -> str:
        """The expression from which the task was made."""
        return task.data["solution"]

    def score(self, task: Task, answer: str) -> float:
        """1.0 if the expression uses every number once and equals the target exactly, else 0.0."""
        found = value_of(answer.strip())
        return float(
            found is not None and found[0] == task.data["target"] and Counter(found[1]) == Counter(task.data["numbers"])
        )


def value_of(text: str) -> tuple[Fraction, list[int]] | None:
    """The exact value of an expression, and the numbers in it. None if it contains anything except numbers, + - * / and
    brackets."""
    if len(text) > _LONGEST:
        return None
    numbers: list[int] = []

    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            numbers.append(node.value)
            return Fraction(node.value)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return Fraction(_OPERATORS[type(node.op)](value(node.left), value(node.right)))
        raise ValueError(ast.dump(node))

    try:
        return value(ast.parse(text, mode="eval").body), numbers
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None
