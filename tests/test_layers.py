"""The rules of the house that syntax can show: imports go down, one reader of the environment, nothing that runs data as code.

Each rule is a function from a file to sentences; it is run over every file, and over planted ones that break it.
"""

import ast
import sys
from collections.abc import Callable, Iterable, Iterator

import pytest

import tilewright
from tests.source import Source, part_of, planted, sources

# From the top down. A part imports parts of lower rows and itself, nothing else; parts in one row do not know each other.
ROWS = (
    ("cli",),
    ("bench",),
    ("server", "rl", "scaling"),
    ("engine", "train", "host"),
    ("quant", "models", "parallel", "data", "placement"),
    ("nn", "fuse"),
    ("ops",),
    ("kernels",),
    ("op",),
    ("tune",),
    ("formats", "asm"),
    ("hw",),
    ("extras",),
)
HEIGHT = {part: -row for row, parts in enumerate(ROWS) for part in parts}

# The scheduler has to be testable, and readable, without tensors.
NO_TENSORS = ("tilewright.engine.request", "tilewright.engine.blocks", "tilewright.engine.schedule")

# Reading any of these can run code that the data brings along.
UNSAFE = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}

# A handler for every exception hides bugs unless it raises again. Where one may swallow: file -> why.
MAY_SWALLOW = {
    "tilewright/tune/measure.py": "a candidate that fails in whatever way is a result of the search",
    "tilewright/host/computing.py": "whatever a user's model raises costs its request, and is said",
    "tilewright/host/worker.py": "whatever a user's model raises while it loads is said, and ends its process",
    "tilewright/rl/environments/worker.py": "whatever a user's reward raises costs its sample, and is counted",
}

DEVICE_PROPERTIES = {"get_device_properties", "get_device_capability", "get_device_name"}


def imported(source: Source) -> Iterator[tuple[int, str]]:
    """(line, module) of every import at any depth, `import_module("...")` too; `from tilewright import x` gives x's home."""
    for node in source.nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            module = node.module or ""
            if module == "tilewright":
                # A lazy public name stands for the module behind it.
                homes = (tilewright._PUBLIC.get(alias.name, f"tilewright.{alias.name}") for alias in node.names)
                yield from ((node.lineno, home.partition(":")[0]) for home in homes if home != "tilewright.__version__")
            else:
                yield node.lineno, module
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            if name_of(node.func) in ("import_module", "importlib.import_module", "__import__"):
                yield node.lineno, str(node.args[0].value)


def name_of(node: ast.AST) -> str:
    """A dotted name as written, "" for anything else."""
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}".removeprefix(".")
    return node.id if isinstance(node, ast.Name) else ""


def imports_go_down(source: Source) -> Iterator[str]:
    part = source.part
    if part and part not in HEIGHT:
        yield f"{source.path}: {part} is in no row; give it one in ROWS and in the design"
        return
    for line, module in imported(source):
        target = part_of(module)
        if module.partition(".")[0] != "tilewright" or target in (part, ""):
            continue
        if target not in HEIGHT:
            yield f"{source.path}:{line}: imports {module}, which is in no row"
        elif not part:
            yield f"{source.path}:{line}: the root imports {module}; it names parts lazily"
        elif HEIGHT[target] >= HEIGHT[part]:
            row = "its own row" if HEIGHT[target] == HEIGHT[part] else "a higher row"
            yield f"{source.path}:{line}: {part} imports {module} of {row}"


def hw_imports_torch_and_triton_only(source: Source) -> Iterator[str]:
    if source.part == "hw":
        for line, module in imported(source):
            top = module.partition(".")[0]
            if top not in {"tilewright", "torch", "triton", "pynvml"} | sys.stdlib_module_names:
                yield f"{source.path}:{line}: hw imports {module}; it may import torch, triton and pynvml"


def only_hw_env_reads_the_environment(source: Source) -> Iterator[str]:
    if not source.path.startswith("tilewright/") or source.path == "tilewright/hw/env.py":
        return
    names = {"environ", "environb", "getenv", "getenvb", "putenv"}
    for node in source.nodes:
        if isinstance(node, ast.Attribute) and name_of(node) in {f"os.{name}" for name in names}:
            yield f"{source.path}:{node.lineno}: {name_of(node)}; only hw/env.py reads the environment"
        elif isinstance(node, ast.ImportFrom) and node.module == "os" and names & {alias.name for alias in node.names}:
            yield f"{source.path}:{node.lineno}: imports the environment from os; only hw/env.py reads it"


def only_hw_device_reads_device_properties(source: Source) -> Iterator[str]:
    if not source.path.startswith("tilewright/") or source.path == "tilewright/hw/device.py":
        return
    for node in source.nodes:
        named = [node.attr] if isinstance(node, ast.Attribute) else []
        named += [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
        yield from (
            f"{source.path}:{node.lineno}: {name}; ask tilewright.hw.device.device_of"
            for name in named
            if name in DEVICE_PROPERTIES
        )


def data_is_never_code(source: Source) -> Iterator[str]:
    for line, module in imported(source):
        if module.partition(".")[0] in UNSAFE:
            yield f"{source.path}:{line}: imports {module}; data must not be able to run code"
    for node in source.nodes:
        from_torch = isinstance(node, ast.ImportFrom) and node.module == "torch" and "load" in {a.name for a in node.names}
        if from_torch or (isinstance(node, ast.Attribute) and name_of(node) == "torch.load"):
            yield f"{source.path}:{node.lineno}: torch.load unpickles; use safetensors"
        if isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "trust_remote_code"):
            yield f"{source.path}:{node.lineno}: {node.arg}; data must not be able to run code"


def imports_are_absolute_and_named(source: Source) -> Iterator[str]:
    for node in source.nodes:
        if isinstance(node, ast.ImportFrom):
            if node.level:
                yield f"{source.path}:{node.lineno}: relative import"
            if any(alias.name == "*" for alias in node.names):
                yield f"{source.path}:{node.lineno}: import *"


def handlers_name_what_they_catch(source: Source) -> Iterator[str]:
    if source.path in MAY_SWALLOW:
        return
    for node in source.nodes:
        if isinstance(node, ast.ExceptHandler) and not isinstance(node.body[-1], ast.Raise):
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            if any(kind is None or name_of(kind) in ("Exception", "BaseException") for kind in caught):
                yield f"{source.path}:{node.lineno}: catches everything and goes on"


Rule = Callable[[Source], Iterable[str]]
PACKAGE_RULES: tuple[Rule, ...] = (
    imports_go_down,
    hw_imports_torch_and_triton_only,
    only_hw_env_reads_the_environment,
    only_hw_device_reads_device_properties,
)
RULES: tuple[Rule, ...] = (data_is_never_code, imports_are_absolute_and_named, handlers_name_what_they_catch)


@pytest.mark.parametrize("rule", PACKAGE_RULES, ids=lambda rule: rule.__name__)
def test_package(rule: Rule) -> None:
    found = [finding for source in sources("tilewright") for finding in rule(source)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_repository(rule: Rule) -> None:
    found = [finding for source in sources("tilewright", "tests", "scripts") for finding in rule(source)]
    assert not found, "\n".join(found)


def reached(start: str, files: dict[str, Source]) -> dict[str, str]:
    """Every module outside the package that `start` imports, directly or not -> the module that imports it."""
    outside: dict[str, str] = {}
    waiting, seen = [start], set()
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        for _, name in imported(files[module]):
            if name in files:
                waiting.append(name)
            elif not name.startswith("tilewright"):
                outside.setdefault(name.partition(".")[0], module)
    return outside


def test_scheduling_needs_no_tensors() -> None:
    files = {source.module: source for source in sources("tilewright")}
    for start in NO_TENSORS:
        for name, importer in reached(start, files).items():
            arrays = start == "tilewright.engine.schedule"
            banned = ("torch", "triton") if arrays else ("torch", "triton", "numpy")
            assert name not in banned, f"{start} reaches {name} through {importer}"


# (rule, where, source, part of the finding; None: there must be none)
PLANTED: tuple[tuple[Rule, str, str, str | None], ...] = (
    (imports_go_down, "tilewright/nn/a.py", "from tilewright.ops import x", None),
    (imports_go_down, "tilewright/nn/a.py", "from tilewright.nn.b import x\nimport os, torch", None),
    (imports_go_down, "tilewright/cli/a.py", "from tilewright import __version__, ops", None),
    (imports_go_down, "tilewright/kernels/a.py", "from tilewright import ops", "imports tilewright.ops of a higher row"),
    (imports_go_down, "tilewright/nn/a.py", "from tilewright import LLM", "imports tilewright.engine.llm of a higher row"),
    (
        imports_go_down,
        "tilewright/op.py",
        "import tilewright.kernels.norm.rms_norm as k",
        "op imports tilewright.kernels.norm.rms_norm",
    ),
    (imports_go_down, "tilewright/asm/a.py", "def f():\n    from tilewright.op import Op", "a.py:2: asm imports"),
    (imports_go_down, "tilewright/hw/a.py", "if TYPE_CHECKING:\n    import tilewright.tune.space", "a.py:2: hw imports"),
    (imports_go_down, "tilewright/ops/a.py", "import_module('tilewright.cli')", "ops imports tilewright.cli of a higher row"),
    (imports_go_down, "tilewright/models/a.py", "import tilewright.quant", "models imports tilewright.quant of its own row"),
    (imports_go_down, "tilewright/novel/a.py", "", "novel is in no row"),
    (imports_go_down, "tilewright/nn/a.py", "import tilewright.novel", "imports tilewright.novel, which is in no row"),
    (imports_go_down, "tilewright/__init__.py", "from tilewright import ops", "the root imports tilewright.ops"),
    (hw_imports_torch_and_triton_only, "tilewright/hw/a.py", "import torch.cuda, functools", None),
    (hw_imports_torch_and_triton_only, "tilewright/hw/a.py", "import numpy as np", "hw imports numpy"),
    (only_hw_env_reads_the_environment, "tilewright/hw/env.py", "import os\nos.environ", None),
    (only_hw_env_reads_the_environment, "tilewright/hw/a.py", "import os\nx = os.environ['A']", "a.py:2: os.environ"),
    (only_hw_env_reads_the_environment, "tilewright/cli/a.py", "import os\nos.getenv('A')", "os.getenv"),
    (only_hw_env_reads_the_environment, "tilewright/cli/a.py", "from os import environ", "imports the environment"),
    (only_hw_device_reads_device_properties, "tilewright/hw/device.py", "torch.cuda.get_device_name(0)", None),
    (only_hw_device_reads_device_properties, "tilewright/hw/a.py", "torch.cuda.get_device_name(0)", "get_device_name"),
    (only_hw_device_reads_device_properties, "tilewright/a.py", "import torch as t\nt.cuda.get_device_capability()", "a.py:2"),
    (
        only_hw_device_reads_device_properties,
        "tilewright/a.py",
        "from torch.cuda import get_device_properties",
        "ask tilewright",
    ),
    (data_is_never_code, "tests/a.py", "def f():\n    import pickle", "a.py:2: imports pickle"),
    (data_is_never_code, "tests/a.py", "from dill import loads", "imports dill"),
    (data_is_never_code, "tests/a.py", "import torch\ntorch.load('x')", "torch.load unpickles"),
    (data_is_never_code, "tests/a.py", "from torch import load", "torch.load unpickles"),
    (data_is_never_code, "tests/a.py", "np.load('x', allow_pickle=True)", "allow_pickle"),
    (data_is_never_code, "tests/a.py", "np.load('x'), json.load(f), model.load('pickle')", None),
    (imports_are_absolute_and_named, "tests/a.py", "from . import b", "relative import"),
    (imports_are_absolute_and_named, "tests/a.py", "from ..x import b", "relative import"),
    (imports_are_absolute_and_named, "tests/a.py", "from x import *", "import *"),
    (handlers_name_what_they_catch, "a.py", "try: f()\nexcept Exception: pass", "a.py:2: catches everything"),
    (handlers_name_what_they_catch, "a.py", "try: f()\nexcept: pass", "catches everything"),
    (handlers_name_what_they_catch, "a.py", "try: f()\nexcept (ValueError, BaseException): pass", "catches everything"),
    (handlers_name_what_they_catch, "a.py", "try: f()\nexcept Exception as e:\n    clean()\n    raise", None),
    (handlers_name_what_they_catch, "a.py", "try: f()\nexcept ValueError: pass", None),
    (handlers_name_what_they_catch, "tilewright/tune/measure.py", "try: f()\nexcept Exception: pass", None),
)


@pytest.mark.parametrize(("rule", "path", "text", "finding"), PLANTED)
def test_rules_find_what_is_planted(rule: Rule, path: str, text: str, finding: str | None) -> None:
    found = list(rule(planted(path, text)))
    assert len(found) == (finding is not None), found
    assert finding is None or finding in found[0]
