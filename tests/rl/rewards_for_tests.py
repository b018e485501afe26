"""An environment whose answers say what its reward does."""

import os
import time

from tilewright.rl.environments.base import Task


class Misbehaving:
    """Scores a number as itself; other words are what goes wrong."""

    def task(self, seed: int) -> Task:
        return Task(prompt=str(seed))

    def score(self, task: Task, answer: str) -> float:
        print("a reward may print")
        if answer == "hang":
            time.sleep(60)
        if answer == "spin":
            while True:
                pass
        if answer == "memory":
            return float(len(bytearray(4 << 30)))
        if answer == "die":
            os._exit(3)
        if answer == "child":
            os.system("sleep 60")
        if answer == "list":
            return [1.0]  # pyright: ignore[reportReturnType]
        return float(answer)


class Guessing:
    """Guess a number from 0 to 99: the reply says whether it is smaller; the right number ends it."""

    def task(self, seed: int) -> Task:
        return Task(prompt="=", data={"number": seed * 37 % 100})

    def reply(self, task: Task, answers: list[str]) -> str | None:
        said = answers[-1].strip()
        if not said.isdecimal():
            return ">"
        return None if int(said) == task.data["number"] else "<" if task.data["number"] < int(said) else ">"

    def score(self, task: Task, answer: str) -> float:
        said = answer.strip()
        return 1.0 - abs(int(said) - task.data["number"]) / 100 if said.isdecimal() else 0.0


class Same:
    """Every answer gets one reward."""

    def task(self, seed: int) -> Task:
        return Task(prompt=str(seed % 10))

    def score(self, task: Task, answer: str) -> float:
        return 0.5


class Lists(Same):
    """A reward of the wrong shape, for some answers."""

    def score(self, task: Task, answer: str) -> float:
        return [0.5] if answer.strip().isdecimal() else float(len(answer))  # pyright: ignore[reportReturnType]


class Long(Same):
    """Prompts that no context takes; `Later` has one behind those that are looked at before the start."""

    def task(self, seed: int) -> Task:
        return Task(prompt="1" * 3000)


class Later(Same):
    """Its 300th prompt is longer than any before it."""

    def task(self, seed: int) -> Task:
        return Task(prompt="1" * (100 if seed >= 300 else 3))


class Silent(Guessing):
    """Its replies fail."""

    def reply(self, task: Task, answers: list[str]) -> str | None:
        raise RuntimeError("no words")
