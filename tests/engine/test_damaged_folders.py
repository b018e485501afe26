"""Model folders that are damaged, or made to hurt: each is one sentence, in a moment, before anything large is allocated."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.server.tiny_model import write_tiny_model
from tilewright.engine.config import EngineConfig
from tilewright.engine.loading import load

MAX_S = 2.0
MAX_BYTES = 1 << 30

Damage = Callable[[Path], object]


def config(**changes: Any) -> Damage:
    """Change keys of config.json."""
    return lambda folder: edit(folder / "config.json", **changes)


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def text(name: str, content: str | bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def pipe(name: str) -> Damage:
    def make(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return make


def link(name: str, target: str) -> Damage:
    def make(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return make


def index(*files: str) -> Damage:
    """An index that names these files, one tensor each."""
    content = json.dumps({"weight_map": {f"tensor{i}": name for i, name in enumerate(files)}})
    return text("model.safetensors.index.json", content)


def template(source: str) -> Damage:
    return text("chat_template.jinja", source)


def twice(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors, folder / "a.safetensors")
    save_file(dict(list(tensors.items())[:1]), folder / "b.safetensors")
    index("a.safetensors", "b.safetensors")(folder)


def header(entries: str) -> Damage:
    """Weights with a header of these entries, and no data worth the name."""
    raw = entries.encode()
    return text("model.safetensors", len(raw).to_bytes(8, "little") + raw + bytes(64))


ONE = '"{}": {{"dtype": "F32", "shape": {}, "data_offsets": {}}}'
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64}
DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000
NOT_WHOLE = "not a complete safetensors file"
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = "{% set n = namespace(x='ab') %}{% for i in range(200) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}"

DAMAGED: dict[str, tuple[Damage, str]] = {
    # config.json
    "100,000 layers": (config(num_hidden_layers=100_000), "num_hidden_layers is 100000, wanted less than or equal to 512"),
    "a billion positions": (config(max_position_embeddings=10**9), "max_position_embeddings is 1000000000, wanted less than"),
    "a number of 5,000 digits": (text("config.json", '{"vocab_size": ' + "9" * 5000 + "}"), "config.json is not JSON"),
    "a huge number": (config(hidden_size=10**30), "hidden_size is 10{30}, wanted"),
    "nested 100,000 deep": (text("config.json", DEEP), "config.json is nested too deeply"),
    "rope_scaling 5": (config(rope_scaling=5), "rope_scaling is 5, wanted"),
    "rope_scaling a list": (config(rope_parameters=[1]), "rope_parameters is a list of 1, wanted"),
    "eos_token_id a word": (config(eos_token_id="a"), "eos_token_id is 'a', wanted integer"),
    "eos_token_id a list of words": (config(eos_token_id=["a"]), "eos_token_id.*wanted"),
    "eos_token_id negative": (config(eos_token_id=-1), "eos_token_id is -1, wanted greater than or equal to 0"),
    "vocab_size true": (config(vocab_size=True), "vocab_size is True, wanted integer"),
    "vocab_size a fraction": (config(vocab_size=25.5), "vocab_size is 25.5, wanted integer"),
    "vocab_size null": (config(vocab_size=None), "vocab_size must be a positive integer, got None"),
    "no heads": (config(num_attention_heads=0), "num_attention_heads is 0, wanted greater than or equal to 1"),
    "rope_theta 0": (config(rope_theta=0), "rope_theta is 0, wanted greater than 0"),
    "rope_theta NaN": (config(rope_theta=float("nan")), "rope_theta is nan, wanted a finite number"),
    "rope_theta infinite": (config(rope_theta=float("inf")), "rope_theta is inf, wanted a finite number"),
    "rope_theta tiny": (config(rope_theta=1e-300), "angles are not finite"),
    "yarn with theta 1": (
        config(rope_theta=1.0, rope_scaling={"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}),
        "rotary embedding that is not supported",
    ),
    "linear by 0": (config(rope_scaling={"rope_type": "linear", "factor": 0}), "rope_scaling.factor is 0, wanted greater than"),
    "rms_norm_eps a word": (config(rms_norm_eps="small"), "rms_norm_eps is 'small', wanted number"),
    "hidden_act a list": (config(hidden_act=["silu"]), "hidden_act is a list of 1, wanted string"),
    "architectures an object": (config(architectures={"a": 1}), "must name one architecture"),
    "architectures of numbers": (config(architectures=[7]), "must name one architecture"),
    "layer_types of numbers": (config(layer_types=[1, 2]), "layer_types.0 is 1, wanted string"),
    "a billion layer types": (config(layer_types=["full_attention"] * 5000), "layer_types is a list of 5000, wanted"),
    "quantization_config a word": (config(quantization_config="int8"), "quantization_config is 'int8', wanted"),
    "config_groups a list": (
        config(quantization_config={"quant_method": "compressed-tensors", "config_groups": [1]}),
        "quantization_config has a field of the wrong type",
    ),
    "a pattern without end": (
        config(quantization_config={**AWQ, "modules_to_not_convert": ["re:(a+)+$"]}),
        "nested repetitions",
    ),
    "a pattern that is none": (
        config(quantization_config={**AWQ, "modules_to_not_convert": ["re:("]}),
        "wrong type or form",
    ),
    "a pipe for config.json": (pipe("config.json"), "config.json is not an ordinary file but a pipe"),
    "a device for config.json": (link("config.json", "/dev/zero"), "config.json is not an ordinary file but a device"),
    "bytes for config.json": (text("config.json", b"\xff\xfe\x00"), "config.json is not UTF-8"),
    "a pipe for generation_config.json": (pipe("generation_config.json"), "generation_config.json is not an ordinary file"),
    "generation_config.json of words": (text("generation_config.json", '{"eos_token_id": "</s>"}'), "eos_token_id is '</s>'"),
    # weights
    "a pipe for weights": (pipe("model.safetensors"), "model.safetensors is not an ordinary file but a pipe"),
    "a device for weights": (link("model.safetensors", "/dev/zero"), "model.safetensors is not an ordinary file but a device"),
    "weights elsewhere": (index("../../../../etc/passwd"), "names '../../../../etc/passwd' as a file of weights"),
    "weights at an absolute path": (index("/etc/passwd"), "names '/etc/passwd' as a file of weights"),
    "weights in a folder": (index("a/b.safetensors"), "names 'a/b.safetensors' as a file of weights"),
    "a shard that is a pipe": (lambda f: (index("s.safetensors")(f), pipe("s.safetensors")(f)), "is not an ordinary"),
    "an index of nothing": (index(), "lists 0 files of weights"),
    "an index of 100,000 files": (index(*(f"{i}.safetensors" for i in range(100_000))), "lists 100000 files of weights"),
    "a tensor in two files": (twice, "has the tensor .*, which is also in another file"),
    "a tensor twice in a file": (
        header("{" + ", ".join([ONE.format("a", [4], [0, 16])] * 2) + "}"), "not a complete safetensors file|contradict",
    ),
    "a header of a terabyte": (text("model.safetensors", (1 << 40).to_bytes(8, "little") + b"{}"), NOT_WHOLE),
    "shapes that overflow": (header("{" + ONE.format("a", [2**62, 8], [0, 16]) + "}"), NOT_WHOLE),
    "tensors that overlap": (
        header("{" + ONE.format("a", [4], [0, 16]) + ", " + ONE.format("b", [4], [8, 24]) + "}"), NOT_WHOLE,
    ),
    "an unknown dtype": (header('{"a": {"dtype": "F3", "shape": [4], "data_offsets": [0, 16]}}'), NOT_WHOLE),
    # the tokenizer
    "a pipe for tokenizer.json": (pipe("tokenizer.json"), "tokenizer.json is not an ordinary file but a pipe"),
    "a folder for tokenizer.json": (
        lambda f: ((f / "tokenizer.json").unlink(), (f / "tokenizer.json").mkdir()), "tokenizer.json is not an ordinary file",
    ),
    "a nested tokenizer.json": (text("tokenizer.json", DEEP), "tokenizer.json is not a tokenizer"),
    "a nested tokenizer_config.json": (text("tokenizer_config.json", DEEP), "tokenizer_config.json is nested too deeply"),
    "a bos_token of a wrong type": (lambda f: edit(f / "tokenizer_config.json", bos_token=[1]), "wanted a string or an object"),
    "a template that loops": (template(ENDLESS), "does not come to an end"),
    "a template that doubles": (template(DOUBLING), "does not come to an end"),
    "a template that multiplies": (template("{{ 'a' * 10**10 }}"), "does not come to an end"),
    "a template that pads": (template("{{ 'a'.center(10**10) }}"), "does not come to an end"),
    "a template nested too deeply": (template("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"), "chat template"),
    "a template of 2 MB": (template("x" * 2_000_000), "wanted at most 1048576"),
    "a template that is none": (template("{% if %}"), "chat template is not valid"),
    "a pipe for a template": (pipe("chat_template.jinja"), "chat_template.jinja is not an ordinary file but a pipe"),
}  # fmt: skip


def cpu_s() -> float:
    """Processor time of this process and its children: a busy machine fails nothing."""
    return sum(os.times()[:4])


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found
    return int(found[1]) << 10


@pytest.fixture(scope="module", autouse=True)
def imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What loading imports late is not the time of the first row."""
    load(write_tiny_model(tmp_path_factory.mktemp("whole") / "tiny"), EngineConfig(device="cpu", max_seqs=2))


@pytest.mark.parametrize(("damage", "words"), DAMAGED.values(), ids=list(DAMAGED))
def test_one_sentence_in_a_moment(damage: Damage, words: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    damage(folder)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is from here on
    before, start_s = peak_bytes(), cpu_s()
    with pytest.raises(ValueError, match=words) as caught:
        load(folder, EngineConfig(device="cpu", max_seqs=2))
    assert cpu_s() - start_s < MAX_S
    assert peak_bytes() - before < MAX_BYTES
    lines = str(caught.value).strip().splitlines()
    assert lines
    assert len(lines) == 1 or "contradict each other" in lines[0], lines
    assert max(map(len, lines)) < 700


def test_templates_that_refuse_a_message_or_have_much_to_say_are_fine(tmp_path: Path) -> None:
    for number, source in enumerate(("{{ raise_exception('no user turns') }}", "{{ messages[0]['content'] * 1000 }}")):
        folder = write_tiny_model(tmp_path / str(number))
        template(source)(folder)
        loaded = load(folder, EngineConfig(device="cpu", max_seqs=2))
        assert loaded.tokenizer is not None
        assert loaded.tokenizer.encode("a") == [97]


def test_a_machine_without_another_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    loaded = load(write_tiny_model(tmp_path / "tiny"), EngineConfig(device="cpu", max_seqs=2))
    assert loaded.tokenizer is not None
    assert "the chat template was not tried" in caplog.text
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ValueError, match="could not be tried: exit code 1"):
        load(tmp_path / "tiny", EngineConfig(device="cpu", max_seqs=2))


CLI = ("a pipe for config.json", "a template that doubles")


@pytest.mark.parametrize("name", CLI)
def test_the_command_line_says_it_in_its_last_line(name: str, tmp_path: Path) -> None:
    damage, words = DAMAGED[name]
    folder = write_tiny_model(tmp_path / "tiny")
    damage(folder)
    command = [sys.executable, "-m", "tilewright.cli", "run", str(folder), "-p", "x", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert re.match(f"error: .*{words}", done.stderr.splitlines()[-1])


def test_memory_that_is_gone_is_said_by_name(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """An error without a message is not `error: ` with nothing behind it."""
    import typer

    from tilewright.cli.root import plain_errors

    class Context:
        obj = False

    for error in (MemoryError(), ValueError("  "), OSError()):
        with pytest.raises(typer.Exit), plain_errors(Context()):  # type: ignore[arg-type]
            raise error
        assert capsys.readouterr().err == f"error: {type(error).__name__}\n"


def test_a_zero_sized_parameter_is_no_weight(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "model.norm.weight": torch.empty(0)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.norm\.weight: shape is \[0\], config\.json requires \[32\]"):
        load(folder, EngineConfig(device="cpu", max_seqs=2))
