"""Whole models from ONNX files: beside ONNX Runtime, through export and serving, and files that are none."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn
from typer.testing import CliRunner

import tilewright as tw
from tests.fuse.zoo_models import BESIDE, _package
from tilewright.cli import app
from tilewright.cli.export import _shapes
from tilewright.host.config import ModelConfig
from tilewright.host.export import export
from tilewright.host.exported import load_exported
from tilewright.host.loaded import load
from tilewright.host.onnx.module import OnnxModule, onnx_model
from tilewright.host.sources import is_ordinary, sources_of

runtime = pytest.importorskip("onnxruntime", reason="pip install 'tilewright[compare]'")


class Recurrent(nn.Module):
    """LSTM and GRU, both ways and in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 5, num_layers=2, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(10, 4, bidirectional=True, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(self.lstm(x)[0])[0]


class Views(nn.Module):
    """Shapes that are computed from the input's."""

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        y = x.reshape(n, c, h * w).transpose(1, 2)
        y = torch.cat([y[:, ::2], y[:, 1::2]], 1).softmax(-1).unflatten(1, (h, w))
        return y.permute(0, 3, 1, 2).flatten(2).mean(-1) + x.new_zeros(n, c)


def small_cnn() -> nn.Module:
    body = [nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.Hardswish(), nn.ConvTranspose2d(8, 4, 2, 2), nn.GroupNorm(2, 4)]
    return nn.Sequential(*body, nn.Upsample(scale_factor=2), nn.AvgPool2d(3, 2, 1), nn.PReLU(4), nn.Flatten(), nn.LazyLinear(5))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, activation="gelu", norm_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolutions": (small_cnn, (2, 3, 16, 16)),
    "encoder": (encoder, (2, 7, 16)),
    "recurrent": (Recurrent, (2, 7, 6)),
    "views": (Views, (2, 3, 4, 6)),
}


def written(module: nn.Module, x: Tensor, path: Path, *, dynamo: bool = False) -> Path:
    """The module as an ONNX file with an open batch."""
    module.eval()
    if dynamo:
        dims = ({0: torch.export.Dim("batch")},)
        torch.onnx.export(module, (x,), path, dynamo=True, verbose=False, dynamic_shapes=dims, external_data=False)
    else:
        torch.onnx.export(module, (x,), path, dynamo=False, input_names=["x"], output_names=["y"], dynamic_axes={"x": {0: "b"}})
    return path


def beside_runtime(path: Path, x: Tensor) -> None:
    """The file's answers for x and for three times as many rows, as it is and optimised, are ONNX Runtime's."""
    session = runtime.InferenceSession(str(path))
    module, examples = onnx_model(path)
    assert [example.shape[1:] for example in examples] == [x.shape[1:]]
    fast = tw.optimize(module, x, "fp32", report=False, compiled=False, measure=False)
    assert fast.made[0].captured is not None, "it is not traced as a whole"
    for rows in (x, torch.cat([x, x.flip(0), x])):
        (wanted,) = session.run(None, {session.get_inputs()[0].name: rows.numpy()})
        for model in (module, fast):
            with torch.no_grad():
                (got,) = model(rows).values()
            limit = 2e-5 * max(1.0, float(np.abs(wanted).max()))
            assert np.abs(got.numpy() - wanted).max() <= limit


@pytest.mark.parametrize("name", MODELS)
def test_small_models(name: str, tmp_path: Path) -> None:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    x, module = torch.randn(shape), make().eval()
    module(x)  # lazy layers
    beside_runtime(written(module, x, tmp_path / "m.onnx"), x)


ZOO = {
    "resnet18": ("torchvision", {}, 64),
    "mobilenet_v3_small": ("torchvision", {}, 64),
    "squeezenet1_1": ("torchvision", {}, 64),
    "vit_tiny_patch16_224": ("timm", {"img_size": 64}, 64),
    "convnext_atto": ("timm", {}, 64),
    "efficientnet_b0": ("timm", {}, 64),
    "mixer_s32_224": ("timm", {"img_size": 64}, 64),
    "swin_tiny_patch4_window7_224": ("timm", {"img_size": 56}, 56),
}


@pytest.mark.long
@pytest.mark.parametrize("dynamo", [False, True], ids=["trace", "dynamo"])
@pytest.mark.parametrize("name", ZOO)
def test_models_of_others(name: str, dynamo: bool, tmp_path: Path) -> None:
    if not (BESIDE / "timm").is_dir():
        pytest.skip("timm and torchvision are not there: `make setup-test` installs them")
    package, options, side = ZOO[name]
    torch.manual_seed(0)
    timm = _package("timm")
    models = sys.modules["torchvision"].models if package == "torchvision" else None
    module = getattr(models, name)(**options) if models else timm.create_model(name, **options)
    for parameter in module.parameters():  # heads that begin with zeros say nothing
        if not parameter.any():
            nn.init.normal_(parameter, std=0.02)
    x = torch.randn(2, 3, side, side)
    beside_runtime(written(module, x, tmp_path / "m.onnx", dynamo=dynamo), x)


@pytest.mark.long
@pytest.mark.parametrize("name", ["resnet50", "densenet121", "squeezenet", "shufflenet", "inception_v2"])
def test_old_files_of_other_frameworks(name: str) -> None:
    """Written by Caffe2 in 2017, in opset 9 and before; onnx brings them without weights of their own."""
    path = Path(onnx.__file__).parent / f"backend/test/data/light/light_{name}.onnx"
    if not path.is_file():
        pytest.skip(f"this onnx has no {path.name}")
    session = runtime.InferenceSession(str(path))
    module, (x,) = onnx_model(path)
    (wanted,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    (got,) = module(x).values()
    assert np.abs(got.detach().numpy() - wanted).max() <= 1e-4 * max(1.0, np.abs(wanted).max())


# ---- the way to a server


def test_exported_and_loaded(tmp_path: Path) -> None:
    """An exported file, and model.onnx in a version's folder, answer as the module did, under the file's names."""
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3)).eval(), torch.randn(2, 6)
    path = written(module, x, tmp_path / "model.onnx")
    taken, examples = onnx_model(path)
    signature = export(taken, examples, tmp_path / "out", ModelConfig(precision="fp32", max_batch=4))
    assert [(one.name, list(one.shape)) for one in signature.inputs] == [("x", [-1, 6])]
    assert [one.name for one in signature.outputs] == ["y"]
    exported, _ = load_exported(tmp_path / "out", torch.device("cpu"))
    loaded = load(ModelConfig(device="cpu"), tmp_path)
    for model in (exported, loaded.module):
        assert torch.allclose(model(x)["y"], module(x), atol=1e-5)
    assert loaded.signature == signature
    assert is_ordinary(str(path))
    assert list(sources_of([str(path)], _host_config())) == ["model"]


def _host_config() -> Any:
    from tilewright.host.config import HostConfig

    return HostConfig()


def test_the_command(tmp_path: Path) -> None:
    """`tilewright export FILE --shape ...`: open dimensions are said, or asked for in a sentence."""
    graph = helper.make_graph(
        [helper.make_node("Gelu", ["ids.1"], ["out"])],
        "g",
        [helper.make_tensor_value_info("ids.1", TensorProto.FLOAT, ["b", "s", 4])],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, ["b", "s", 4])],
    )
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]), path)
    words = ["export", str(path), "--out", str(tmp_path / "out"), "--max-batch", "2"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1
    assert "give them: tilewright export ... --shape ids.1=2,N,4" in done.stderr
    done = CliRunner().invoke(app, [*words, "--shape", "ids.1=1,10,4"])
    assert done.exit_code == 0, done.stderr
    assert json.loads((tmp_path / "out/program.json").read_text())["signature"]["inputs"][0]["shape"] == [-1, 10, 4]


@pytest.mark.parametrize("text", ["x", "x=", "x=0,2", "x=2,a", "=2", "x=99999999999"])
def test_shapes_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="wanted NAME=N,N"):
        _shapes([text])


def _one(kind: str, inputs: int = 1, domain: str = "", **attributes: Any) -> onnx.ModelProto:
    names = [f"x{i}" for i in range(inputs)]
    given = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 3]) for name in names]
    node = helper.make_node(kind, names, ["y"], domain=domain, **attributes)
    graph = helper.make_graph([node], "g", given, [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 3])])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("com.shop", 1)])


_EMPTY = helper.make_graph([], "branch", [], [])
REFUSALS = {
    "foreign": (_one("Magic", domain="com.shop"), "Magic of domain com.shop cannot be taken"),
    "no counterpart": (_one("NonMaxSuppression", 2), "NonMaxSuppression cannot be taken: it has no counterpart here"),
    "branches": (_one("If", then_branch=_EMPTY, else_branch=_EMPTY), "it has graphs of its own"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_taken_is_one_sentence(name: str, tmp_path: Path) -> None:
    model, words = REFUSALS[name]
    path = tmp_path / "m.onnx"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ValueError, match=words):
        onnx_model(path)


def test_shapes_that_depend_on_numbers_are_refused() -> None:
    model = _one("Tile", 2)
    model.graph.input[1].type.tensor_type.elem_type = TensorProto.INT64
    with pytest.raises(ValueError, match="Tile cannot be taken: the repeats depend on what the numbers are"):
        OnnxModule(model)(torch.ones(2, 3), torch.tensor([2, 2]))


@pytest.mark.parametrize("data", [b"", b"no protobuf", b"\x08\x09" * 50, bytes(range(256))])
def test_files_that_are_none(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(data)
    with pytest.raises(ValueError, match="is no ONNX model"):
        onnx_model(path)
    with pytest.raises(ValueError, match="is no ONNX model"):
        onnx_model(tmp_path / "missing.onnx")
