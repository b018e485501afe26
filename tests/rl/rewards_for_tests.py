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
