"""A rank of the tests: runs a list of cells, one after the other, and writes what the first rank has. `rank.py FOLDER`."""

import json
import sys
from pathlib import Path

from safetensors.torch import save_file
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from tests.parallel.cells import Cell, run
from tilewright.hw.env import launched


def main(folder: Path) -> None:
    """Run the cells that `cells.json` lists."""
    place = launched()
    assert place is not None
    store, _, _ = next(iter(rendezvous("env://")))
    for index, fields in enumerate(json.loads((folder / "cells.json").read_text())):
        cell = Cell(**fields)
        found = run(cell, place.rank, PrefixStore(f"cell {index}", store))
        if place.rank == 0:
            save_file({name: t.contiguous() for name, t in found.items()}, folder / f"{cell.name}.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
