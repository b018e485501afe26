"""How an optimised model is called: from several threads and streams, with other shapes, other structures, in other modes."""

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tilewright
from tilewright.fuse import Optimized, Partial, calls, judge
from tilewright.fuse.check import compare_outputs

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


def normal(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Tokens(nn.Module):
    """Patches of an image behind a class token, with positions: the product of patches writes into rows that outlive it."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.head = nn.Conv2d(3, 24, 4, 4), nn.Linear(24, 8)
        self.token, self.places = nn.Parameter(normal(1, 1, 24)), nn.Parameter(normal(1, 7, 24))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        return self.head(torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places)


class Chosen(nn.Module):
    """Rows are chosen by value, so it is taken apart, and its second child gets another number of rows at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.h = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.h(self.a(x)[x[:, 0] > 0])


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).eval()


def optimized(model: nn.Module, x: Any, **options: Any) -> Optimized:
    return tilewright.optimize(model, x, **{"precision": "fp32", "report": False, "compiled": False, **options})


def right(model: nn.Module, *inputs: Any) -> Any:
    with torch.no_grad():
        return model(*copy.deepcopy(inputs))


def near(want: Any, got: Any, limit: float = 1e-5) -> bool:
    return all(d.rms <= limit for d in compare_outputs(want, got))


# ---- threads and streams


def called_from(threads: int, each: int, one: Callable[[int, int], bool]) -> int:
    """How many calls were wrong; what a call raises counts as well."""
    wrong = [0] * threads

    def run(t: int) -> None:
        for i in range(each):
            try:
                wrong[t] += not one(t, i)
            except Exception:  # of whatever kind: it is a wrong answer
                wrong[t] += 1
                raise

    workers = [threading.Thread(target=run, args=(t,)) for t in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(wrong)


@pytest.mark.parametrize(("make", "shape"), [(Tokens, (3, 8, 12)), (mlp, (8,)), (Chosen, (8,))], ids=["tokens", "mlp", "parts"])
def test_eight_threads_with_mixed_shapes(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = make().eval()
    inputs = [normal(1 + i % 4, *shape, seed=i) for i in range(16)]
    wanted = [right(model, x) for x in inputs]
    done = optimized(model, inputs[1], max_shapes=3)

    def one(thread: int, i: int) -> bool:
        at = (7 * thread + i) % len(inputs)
        return torch.allclose(wanted[at], done(inputs[at]), atol=1e-5)

    assert called_from(8, 100, one) == 0
    if not isinstance(done, Partial):
        assert sum(done.report.calls.values()) == 800
        assert done.report.calls["as given"] == 200, "one shape of four is beyond max_shapes"


def test_eight_threads_in_inductors_code() -> None:
    model, inputs = mlp(), [normal(2, 8, seed=i) for i in range(8)]
    wanted = [right(model, x) for x in inputs]
    done = optimized(model, inputs[0], compiled=True, measure=False)

    def one(thread: int, i: int) -> bool:
        with torch.inference_mode(thread % 2 == 1), torch.autocast("cpu", torch.bfloat16, enabled=thread % 4 == 3):
            return torch.allclose(wanted[thread], done(inputs[thread]), atol=1e-5)

    assert called_from(8, 1000, one) == 0


@GPU
@pytest.mark.parametrize(("make", "shape"), [(Tokens, (3, 8, 12)), (mlp, (8,))], ids=["tokens", "mlp"])
def test_threads_and_streams_on_a_gpu(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    """Mixed shapes, two streams for each thread, inputs of the device and of pinned memory that is filled again at once."""
    torch.manual_seed(0)
    model = make().eval().cuda()
    inputs = [normal(1 + i % 4, *shape, seed=i).cuda() for i in range(16)]
    wanted = [right(model, x) for x in inputs]
    done = optimized(model, inputs[0], precision="fp16", compiled=None, measure=False, search=None)
    streams = [[torch.cuda.Stream() for _ in range(2)] for _ in range(8)]
    pinned = [[x.cpu().pin_memory() for x in inputs] for _ in range(8)]
    torch.cuda.synchronize()

    def one(thread: int, i: int) -> bool:
        at = (7 * thread + i) % len(inputs)
        with torch.cuda.stream(streams[thread][i % 2]):
            if i % 3 == 0:
                got = done(pinned[thread][at])
                pinned[thread][at].fill_(9.0)
                pinned[thread][at].copy_(inputs[at].cpu())
            else:
                got = done(inputs[at])
            return bool((got - wanted[at]).abs().max() < 2e-2 * wanted[at].abs().max())

    assert called_from(8, 1000, one) == 0
    assert done.report.calls == {"optimised": 8000, "as given": 0}


@GPU
def test_a_result_that_the_next_call_overwrites_is_one_threads() -> None:
    model, x = mlp().cuda(), normal(2, 8).cuda()
    done = optimized(model, x, precision="fp16", compiled=None, copy_outputs=False)
    done(x)
    caught = list[str]()

    def run() -> None:
        try:
            done(x)
        except ValueError as error:
            caught.append(str(error))

    other = threading.Thread(target=run)
    other.start()
    other.join()
    assert "another thread called it before" in caught[0]


# ---- shapes


def test_a_child_gets_other_shapes() -> None:
    torch.manual_seed(0)
    model = Chosen().eval()
    done = optimized(model, normal(6, 8), max_shapes=2)
    assert isinstance(done, Partial)
    for i in range(6):
        x = normal(4 + i, 8, seed=i)
        assert near(right(model, x), done(x))
    text = done.report.text()
    assert "inputs h: others: the original model runs (more than max_shapes=2 combinations of inputs)" in text
    assert done.report.calls["optimised"] > 0
    assert done.report.calls["as given"] > 0


def test_each_shape_has_a_graph_up_to_a_bound() -> None:
    model = mlp()
    done = optimized(model, normal(2, 8), max_shapes=3)
    for rows in (1, 2, 3, 4, 5, 1, 4):
        x = normal(rows, 8)
        assert near(right(model, x), done(x))
    rows = [(s.inputs, s.optimised, s.calls) for s in done.report.shapes]
    assert rows == [
        ("[2, 8] float32", True, 1),
        ("[1, 8] float32", True, 2),
        ("[3, 8] float32", True, 1),
        ("others", False, 3),
    ]
    assert done.report.calls == {"optimised": 4, "as given": 3}
    found = done.report.as_dict()["shapes"]
    assert found[3]["reason"] == "more than max_shapes=3 combinations of inputs"
    weights = [{t.data_ptr() for t in made.captured.fused.buffers()} for made in done.made if made.captured is not None]
    assert weights[0] == weights[1] == weights[2], "the graphs share one set of weights"


@pytest.mark.parametrize(
    ("dynamic", "x", "ran"),
    [
        (True, normal(5, 3, 8), "optimised"),
        (False, normal(5, 3, 8), "as given"),
        ({0: [0]}, normal(5, 3, 8), "optimised"),
        ({0: [0]}, normal(5, 4, 8), "as given"),
        ({"input": [0]}, normal(5, 3, 8), "as given"),
        ({0: [-2]}, normal(2, 4, 8), "optimised"),
        ({0: [0, 1]}, normal(5, 8), "as given"),
    ],
)
def test_dimensions_that_may_vary(dynamic: Any, x: Tensor, ran: str) -> None:
    model = mlp()
    done = optimized(model, normal(2, 3, 8), dynamic=dynamic)
    assert near(right(model, x), done(x))
    assert done.report.calls[ran] == 1


class Options(nn.Module):
    """Takes what is no tensor, and dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor, scale: float = 1.0, more: dict[str, Tensor] | None = None, flag: Any = False) -> Tensor:
        y = self.a(x) * scale
        return (y if more is None else y + more["z"]) - (1.0 if flag else 0.0)


def test_other_arguments_have_graphs_of_their_own() -> None:
    """1, 1.0 and True are three values."""
    model, x = Options().eval(), normal(3, 8)
    done = optimized(model, x)
    each: list[tuple[Any, ...]] = [
        (x, 2.0),
        (x, 2.0),
        (x, 2.0, {"z": x}),
        (x, 1.0, None, 1),
        (x, 1.0, None, True),
        (x.double().float(),),
    ]
    for args in each:
        assert near(right(model, *args), done(*args))
    assert near(right(model, x, 3.0), done(scale=3.0, x=x))
    assert [s.calls for s in done.report.shapes] == [1, 2, 1, 1, 1, 1]
    assert done.report.shapes[1].inputs == "[3, 8] float32, 2.0"
    with pytest.raises(ValueError, match="an argument is or contains a bytearray, which cannot be compared"):
        done(x, 1.0, None, bytearray(1))


def test_the_models_own_errors_are_the_users() -> None:
    """They are raised as they are, and no shape is noted."""
    done = optimized(mlp(), normal(2, 8))
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        done(normal(2, 9))
    with pytest.raises(ValueError, match="requires a gradient, but an optimised model is for inference only"):
        done(normal(2, 8).requires_grad_())
    assert len(done.report.shapes) == 1


def test_a_shape_whose_graph_is_wrong_runs_as_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every graph is checked, not the examples' alone."""
    model, plain = mlp(), calls.linear
    done = optimized(model, normal(2, 8))
    monkeypatch.setattr(calls.linear, "__code__", (lambda x, w, b, r, a, shape, choice=None: x.new_full(shape, 7.0)).__code__)
    monkeypatch.setattr(judge, "layer_errors", lambda *_: [])
    assert near(right(model, normal(3, 8)), done(normal(3, 8)))
    assert calls.linear is plain
    row = done.report.shapes[1]
    assert (row.optimised, row.calls) == (False, 1)
    assert row.reason.startswith("no graph: output of the optimised model is too far from the float model's")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_floats_are_cast_to_the_examples(dtype: torch.dtype) -> None:
    model, x = mlp(), normal(2, 8).half()
    done = optimized(model, x.float())
    assert near(right(model, x.float()), done(x.to(dtype)))
    assert done(x.to(dtype)).dtype == torch.float32
    assert len(done.report.shapes) == 1


# ---- structures


@dataclass
class Answer:
    score: Tensor
    more: dict[str, Any]
    name: str = "x"


class Cache:
    """What is no dataclass and holds tensors in lists, as caches of keys and values do."""

    def __init__(self, words: str):
        self.words, self.layers = words, list[Tensor]()


class Answering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor, cache: Cache | None = None) -> tuple[Answer, Cache]:
        made = Cache("new")
        made.layers = [self.a(x), *([] if cache is None else cache.layers)]
        return Answer(self.a(x).relu(), {"n": 3, "y": (x, None)}), made


def test_objects_come_back_as_what_they_were() -> None:
    model, x = Answering().eval(), normal(3, 8)
    done = optimized(model, x)
    assert not isinstance(done, Partial)
    given = Cache("given")
    given.layers = [x + 1]
    for args in ((x,), (x, given), (x, given)):
        (answer, cache), want = done(*args), right(model, *args)
        assert (type(answer), type(cache), cache.words, answer.name) == (Answer, Cache, "new", "x")
        assert near(want, (answer, cache))
    assert len(given.layers) == 1
    assert [s.calls for s in done.report.shapes] == [1, 2]


def test_hugging_faces_models() -> None:
    """Called by names, with a mask and a cache in what they return."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=50, n_positions=32, bos_token_id=0, eos_token_id=0
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).eval()
    given = {"input_ids": torch.randint(0, 50, (2, 7)), "attention_mask": torch.ones(2, 7, dtype=torch.long)}
    done = optimized(model, given)
    with torch.no_grad():
        want = model(**given)
    got = done(**given)
    assert type(got) is type(want)
    assert type(got.past_key_values) is type(want.past_key_values)
    assert got.past_key_values.get_seq_length() == 7
    assert near(want, got)
    assert done.config is done.model.config
    with pytest.raises(
        AttributeError, match="generate is a method of GPT2LMHeadModel, but only calls of the model itself are optimised"
    ):
        done.generate(given["input_ids"])


# ---- modes


@pytest.mark.parametrize("compiled", [False, True])
def test_the_callers_mode_changes_nothing(compiled: bool) -> None:
    model, x = mlp(), normal(2, 8)
    done = optimized(model, x, compiled=compiled, measure=False)
    want = done(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(want, done(x))
    with torch.inference_mode():
        given = normal(2, 8)
        assert torch.equal(want, done(given))
    assert given.is_inference()
    assert torch.equal(want, done(given))
