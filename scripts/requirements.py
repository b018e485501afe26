"""Print what the package and some of its extras ask for, a line each, without torch and triton.

For an environment in which those two are of other versions than pyproject.toml allows (`make test-newest`).

python scripts/requirements.py test serve
"""

import re
import sys
import tomllib
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).resolve().parent.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def requirements(extras: list[str]) -> list[str]:
    """Of the package, then of the extras; an extra that names other extras of the package stands for these."""
    found = list(PROJECT["dependencies"])
    for extra in extras:
        for line in PROJECT["optional-dependencies"][extra]:
            own = re.fullmatch(rf"{PROJECT['name']}\[(.*)\]", line)
            found += requirements(own[1].split(",")) if own else [line]
    return [line for line in dict.fromkeys(found) if re.split(r"[\s<>=!~;\[]", line)[0] not in ("torch", "triton")]


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1:])))
