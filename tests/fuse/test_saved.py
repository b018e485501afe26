"""What else a user does to an optimised model: saves, loads, moves, copies, trains it. Each works, or is one clear sentence."""

import copy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import tilewright
from tilewright.fuse import Optimized

MODEL = """
import torch
from torch import nn

class Tied(nn.Module):
    '''A table that is the head too, a buffer, arguments by name.'''
    def __init__(self, width=8):
        super().__init__()
        self.table, self.a = nn.Embedding(11, width), nn.Linear(width, width)
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("shift", torch.randn(width))
        self.norm = nn.BatchNorm1d(width)

    def forward(self, ids, *, scale=1.0, more=None):
        y = self.norm((self.a(self.table(ids)) * scale + self.shift).transpose(1, 2)).transpose(1, 2)
        return {"logits": self.head(y), "more": more["x"] + 1}
"""
LOAD = """
import sys, torch, tilewright
from safetensors.torch import load_file, save_file
from users_model import Tied
fast = tilewright.load_optimized(sys.argv[1], Tied(), report=False)
given = load_file(sys.argv[2])
print(fast.report.facts["precision"], fast.report.shapes[0].inputs, fast.settings.max_shapes, fast.settings.dynamic)
got = fast(given["ids"], scale=2.0, more={"x": given["more"]})
save_file({"logits": got["logits"]}, sys.argv[3])
assert fast.report.calls == {"optimised": 1, "as given": 0}, fast.report.text()
"""


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    (tmp_path / "users_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "users_model", raising=False)
    import users_model  # pyright: ignore[reportMissingImports]

    torch.manual_seed(0)
    yield users_model
    del sys.modules["users_model"]  # other tests have another module of that name


def made(model: nn.Module, *args: Any, **kwargs: Any) -> Optimized:
    options = {"report": False, "compiled": False, "precision": "fp32"}
    return tilewright.optimize(model, args, **options, example_kwargs=kwargs, max_shapes=5, dynamic={0: [0], "more": [0]})


def test_a_file_for_another_process(users: Any, tmp_path: Path) -> None:
    model, ids, more = users.Tied().eval(), torch.tensor([[3, 1, 10]]), torch.ones(2)
    fast = made(model, ids, scale=2.0, more={"x": more})
    want = fast(ids, scale=2.0, more={"x": more})["logits"]
    fast.save("model.safetensors")
    save_file({"ids": ids, "more": more}, "given.safetensors")
    done = subprocess.run(
        [sys.executable, "-c", LOAD, *(f"{name}.safetensors" for name in ("model", "given", "got"))],
        capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "fp32 [1, 3] int64, more {'x': '[2] float32'}, scale 2.0 5 {0: [0], 'more': [0]}"
    assert torch.equal(load_file("got.safetensors")["logits"], want)


class Other(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("model", "path", "words"),
    [
        (lambda users: Other(), "model.safetensors", "contains a Tied; got a Other: pass a module of the same class"),
        (
            lambda users: users.Tied(9),
            "model.safetensors",
            "the weights in model.safetensors do not fit the module: size mism",
        ),
        (lambda users: users.Tied(), "gone.safetensors", r"gone.safetensors cannot be read: No such file"),
        (
            lambda users: users.Tied(),
            "users_model.py",
            r"users_model.py cannot be read: .*; wanted a file that save.. of an optimised",
        ),
        (
            lambda users: users.Tied(),
            "plain.safetensors",
            "plain.safetensors has format None; wanted a file that save.. of an optimised",
        ),
    ],
)
def test_files_that_are_refused(users: Any, model: Callable[[Any], nn.Module], path: str, words: str) -> None:
    made(users.Tied(), torch.tensor([[3, 1]]), more={"x": torch.ones(2)}).save("model.safetensors")
    save_file({"a": torch.ones(1)}, "plain.safetensors")
    with pytest.raises(ValueError, match=f"^load_optimized: .*{words}"):
        tilewright.load_optimized(path, model(users))


def test_what_cannot_be_written(users: Any) -> None:
    fast = made(users.Tied(), torch.tensor([[3, 1]]), more={"x": torch.ones(2), "y": torch.float32})
    with pytest.raises(ValueError, match="an example input contains a dtype, which save cannot write"):
        fast.save("model.safetensors")
    fast = made(users.Tied(), torch.tensor([[3, 1]]), more={"x": torch.ones(2)})
    with pytest.raises(ValueError, match=r"nowhere/model\.safetensors cannot be written"):
        fast.save("nowhere/model.safetensors")


class Branching(nn.Module):
    """Reads a value: it is taken apart."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        return self.last(-y if y.sum().item() > 1e9 else y)


@pytest.fixture(scope="module", params=["graph", "parts"])
def fast(request: pytest.FixtureRequest) -> Optimized:
    """One for all: what is done to it changes nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.9), nn.Linear(8, 2)) if request.param == "graph" else Branching()
    done = tilewright.optimize(model, torch.ones(3, 8), "fp16", report=False, compiled=False)
    done.users = model
    return done


def test_weights_have_the_users_names(fast: Optimized) -> None:
    want = fast.users.state_dict()
    found = fast.state_dict()
    assert list(found) == list(want)
    assert all(torch.equal(found[name], want[name]) for name in want)
    assert list(nn.ModuleDict({"inner": fast}).state_dict()) == [f"inner.{name}" for name in want]
    torch.save(found, buffer := __import__("io").BytesIO())
    assert buffer.tell() > 0


def test_saved_and_loaded(fast: Optimized, tmp_path: Path) -> None:
    fast.save(tmp_path / "m.safetensors")
    fresh = copy.deepcopy(fast.users)
    for p in fresh.parameters():
        nn.init.zeros_(p)
    again = tilewright.load_optimized(tmp_path / "m.safetensors", fresh, report=False)
    assert again.report.facts["precision"] == "fp16"
    assert torch.equal(again(torch.ones(3, 8)), fast(torch.ones(3, 8)))
    assert not next(fresh.parameters()).any()


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.to("cpu"), lambda m: m.cpu(), lambda m: m.float(), lambda m: m.to(torch.float32),
        lambda m: m.eval(), lambda m: m.train(),
    ],
)  # fmt: skip
def test_what_changes_nothing_works(fast: Optimized, change: Callable[[Optimized], Optimized]) -> None:
    want = fast(torch.ones(3, 8))
    assert change(fast) is fast
    assert not fast.training
    assert torch.equal(fast(torch.ones(3, 8)), want)
    assert torch.equal(fast(torch.ones(5, 8)), fast(torch.ones(5, 8))), "nor does dropout come back"
    whole = nn.ModuleDict({"inner": fast}).train()
    assert whole.training
    assert not fast.training


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda m: m.half(), ValueError, "its graphs are for fp16 on cpu, so it cannot be moved or cast"),
        (lambda m: m.double(), ValueError, "cannot be moved or cast: move or cast the original model"),
        (lambda m: m.to("meta"), ValueError, "cannot be moved or cast"),
        (lambda m: m.to_empty(device="cpu"), ValueError, "cannot be moved or cast"),
        (lambda m: nn.ModuleDict({"inner": m}).bfloat16(), ValueError, "cannot be moved or cast"),
        (lambda m: m.load_state_dict(m.state_dict()), ValueError, "its weights are folded into its graphs"),
        (lambda m: nn.ModuleDict({"inner": m}).load_state_dict({}), ValueError, "its weights are folded into its graphs"),
        (copy.deepcopy, TypeError, "it cannot be copied or pickled .*save.path. writes a file"),
        (copy.copy, TypeError, "it cannot be copied or pickled"),
        (lambda m: m.__reduce_ex__(4), TypeError, "it cannot be copied or pickled"),
        (lambda m: torch.save(m, __import__("io").BytesIO()), TypeError, "it cannot be copied or pickled"),
    ],
)
def test_what_is_refused_changes_nothing(
    fast: Optimized, change: Callable[[Optimized], Any], error: type[Exception], words: str
) -> None:
    want = fast(torch.ones(3, 8))
    with pytest.raises(error, match=words) as caught:
        change(fast)
    assert "\n" not in str(caught.value)
    assert torch.equal(fast(torch.ones(3, 8)), want)
