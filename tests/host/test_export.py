"""Exported folders: the same answers without the code, nothing but data in them, and kernels that need no GPU to be made."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tilewright.bench.compare.models import load_model
from tilewright.fuse import int8_calls
from tilewright.host.config import ModelConfig
from tilewright.host.export import export
from tilewright.host.exported import PROGRAM, function_named, load_exported, name_of
from tilewright.host.loaded import load

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "precision", "sizes"),
    [
        ("small_cnn", "fp32", (4,)),
        ("tabular_mlp", "bf16", (2,)),
        pytest.param("small_encoder", "fp32", (4,), marks=pytest.mark.long),
    ],
)
def test_an_exported_model_gives_the_answers_of_the_model(
    tmp_path: Path, name: str, precision: str, sizes: tuple[int, ...]
) -> None:
    model = load_model(name)
    config = ModelConfig(precision=precision, max_batch=4, preferred=sizes)
    signature = export(model.module, model.inputs, tmp_path / "m", config)
    exported, read = load_exported(tmp_path / "m", CPU)
    assert read == signature
    assert exported.rows == tuple(sorted({*sizes, 4}))
    x = torch.cat([model.inputs[0]] * 4)[:4] + 0.01
    with torch.no_grad():
        wanted, found = model.module(x), exported(x)["output"]
    assert found.dtype == torch.float32
    error = ((found - wanted).norm() / wanted.norm()).item()
    assert error < {"fp32": 1e-5, "bf16": 2e-2}[precision]
    with pytest.raises(ValueError, match="4 rows, and got 3"):
        exported(x[:3])


class Shapes(nn.Module):
    """No rows, two outputs, constants, and calls that stay torch's."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        grid = torch.arange(x.shape[0], device=x.device, dtype=x.dtype)
        masked = torch.where(x > 0.5, x, float("-inf")).cumsum(0).sort(dim=0).values
        return {"a": (x + grid[:, None]).softmax(0), "b": masked.clamp(-1e9, float("inf")).flip(0)}


def test_a_model_without_rows(tmp_path: Path) -> None:
    x = torch.rand(5, 3, generator=torch.Generator().manual_seed(0))
    signature = export(Shapes().eval(), (x,), tmp_path / "m", ModelConfig(precision="fp32"))
    assert not signature.batched
    loaded = load(ModelConfig(), tmp_path / "m")
    with torch.no_grad():
        wanted = Shapes()(x)
    for spec, found in zip(signature.outputs, loaded.call([x]), strict=True):
        assert torch.allclose(found, wanted[spec.name])


class Branches(nn.Module):
    """A branch on a value, between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.b(x) if x.sum() > 0 else x


def test_what_cannot_be_exported_says_so(tmp_path: Path) -> None:
    x = torch.randn(2, 4)
    with pytest.raises(ValueError, match="cannot be traced as a whole"):
        export(Branches().eval(), (x,), tmp_path / "m", ModelConfig(precision="fp32"))
    with pytest.raises(ValueError, match="open dimensions"):
        export(nn.Linear(4, 4), (x,), tmp_path / "m", ModelConfig(precision="fp32", inputs={"input": (-1, -1)}))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(FileExistsError, match="is not empty"):
        export(nn.Linear(4, 4), (x,), tmp_path / "full", ModelConfig(precision="fp32"))
    assert not (tmp_path / "m").exists()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "m"
    export(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (torch.randn(2, 4),), folder, ModelConfig(precision="fp32", max_batch=2))
    return folder


def test_it_loads_where_neither_the_code_nor_a_compiler_is(exported: Path) -> None:
    """In a process that can start no other, and does not import what made it."""
    script = (
        "import sys, subprocess, os\n"
        "import torch\n"  # torch 2.14 starts a process when it is imported
        "def no(*a, **k): raise AssertionError('started a process')\n"
        "subprocess.Popen.__init__ = no; os.system = no; os.fork = no\n"
        "from pathlib import Path\n"
        "from tilewright.host.exported import load_exported\n"
        "m, s = load_exported(Path(sys.argv[1]), torch.device('cpu'))\n"
        "print(m(torch.ones(2, 4))['output'].sum().item())\n"
        "assert 'tilewright.bench' not in sys.modules and 'tests' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(exported)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    plain, _ = load_exported(exported, CPU)
    assert float(done.stdout) == pytest.approx(plain(torch.ones(2, 4))["output"].sum().item(), rel=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        *("os.system", "builtins.eval", "operator.attrgetter", "operator.methodcaller", "calls.run", "calls.Choice"),
        *(
            "aten.from_file.default",
            "aten.save.default",
            "aten.load.default",
            "aten.relu",
            "aten.relu.nothing",
            "prim.Print.default",
        ),
        *("aten.__class__.__init__", "aten.relu.default.__init__", "aten._dir.__len__", "inductor.x.default", "", "x" * 1000),
    ],
)
def test_a_program_can_name_nothing_but_operators(name: str) -> None:
    with pytest.raises(ValueError, match=r"is not an operator|reads files"):
        function_named(name)


def test_files_keep_their_names_of_int8_calls() -> None:
    """Folders that were written before the functions had their present names."""
    names = {
        "conv_from_codes": int8_calls.conv_int8_to_float,
        "conv_to_codes": int8_calls.conv_int8_to_int8,
        "dequantise": int8_calls.dequantise,
        "layer_norm_codes": int8_calls.layer_norm_quantise,
        "linear_from_codes": int8_calls.linear_int8_to_float,
        "linear_to_codes": int8_calls.linear_int8_to_int8,
        "quantise": int8_calls.quantise,
    }
    for name, function in names.items():
        assert function_named(f"coded_calls.{name}") is function
        assert name_of(function) == f"coded_calls.{name}"


def damaged(said: dict[str, Any], change: str) -> None:
    graph, deep = said["graphs"][0], json.loads("[" * 20 + "]" * 20)
    changes: dict[str, Any] = {
        "a call": lambda: graph["calls"].append(["z", "os.system", ["true"], {}]),
        "an attribute": lambda: graph["calls"].append(["z", "aten.relu.default", [{"dtype": "__builtins__"}], {}]),
        "a node": lambda: graph["calls"].append(["z", "aten.relu.default", [{"node": "nobody"}], {}]),
        "a result": lambda: graph["results"].append("nobody"),
        "a weight": lambda: graph["weights"].append("w99"),
        "a list": lambda: graph["calls"].append(["z", "aten.relu.default", [deep], {}]),
        "the signature": lambda: said["signature"].pop("inputs"),
        "the format": lambda: said.update(format=2),
        "all graphs": lambda: said.update(graphs=[]),
        "a shape": lambda: said["signature"]["inputs"][0].update(datatype="FP99"),
        "keys": lambda: said.pop("weights"),
    }
    changes[change]()


@pytest.mark.parametrize(
    "change",
    [
        *("a call", "an attribute", "a node", "a result", "a weight", "a list", "the signature", "the format", "all graphs"),
        *("a shape", "keys"),
    ],
)
def test_a_damaged_folder_is_one_sentence(exported: Path, tmp_path: Path, change: str) -> None:
    for file in exported.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    said = json.loads((tmp_path / PROGRAM).read_text())
    damaged(said, change)
    (tmp_path / PROGRAM).write_text(json.dumps(said))
    with pytest.raises(ValueError, match=r".") as caught:
        load_exported(tmp_path, CPU)
    assert "\n" not in str(caught.value)


def test_names_in_a_program_never_become_source(exported: Path, tmp_path: Path) -> None:
    for file in exported.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    text = (tmp_path / PROGRAM).read_text()
    evil = "x0=__import__('os').abort()#"
    (tmp_path / PROGRAM).write_text(text.replace('"x0"', json.dumps(evil)))
    loaded, _ = load_exported(tmp_path, CPU)
    plain, _ = load_exported(exported, CPU)
    x = torch.randn(2, 4)
    assert torch.equal(loaded(x)["output"], plain(x)["output"])


@pytest.mark.long
def test_kernels_are_compiled_into_the_folder_without_a_gpu(tmp_path: Path) -> None:
    from tilewright.asm import bundle
    from tilewright.hw.device import device_named

    model = load_model("tabular_mlp")
    config = ModelConfig(precision="fp16", max_batch=16, preferred=(16,))
    export(model.module, model.inputs, tmp_path / "m", config, card=device_named("h100"))
    assert bundle.read(tmp_path / "m" / "kernels").kernels
