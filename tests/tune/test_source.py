"""The hash of a kernel's source: what it follows, and what leaves it alone."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tilewright.tune import source
from tilewright.tune.source import source_hash

FILES = {
    "__init__.py": "",
    "kernels/__init__.py": '"""The kernels."""\n',
    "kernels/top.py": "from planted.kernels.tile import product\n\n\ndef launch(x):\n    return product(x) # once\n",
    "kernels/tile.py": "def product(x):\n    return x * x\n",
    "kernels/other.py": "def product(x):\n    return x + x\n",
    "kernels/wing/__init__.py": '"""A wing."""\n',
    "kernels/wing/deep.py": "def product(x):\n    return -x\n",
    "outside.py": "x = 1\n",
}


@pytest.fixture
def hash_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """(module, **changed files, by path) -> its hash in a package of those files; None as a text removes a file."""
    monkeypatch.syspath_prepend(tmp_path)
    caches = (source_hash, source._read, source._root)

    def hash_of(module: str = "top", changed: dict[str, str | None] = {}) -> str:  # noqa: B006 (it is only read)
        for path, text in {**FILES, **changed}.items():
            file = tmp_path / "planted" / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.unlink(missing_ok=True)
            if text is not None:
                file.write_text(text)
        for cached in caches:
            cached.cache_clear()
        return source_hash(f"planted.kernels.{module}")

    yield hash_of
    for cached in caches:
        cached.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "planted"]:
        del sys.modules[name]


IMPORTS = {
    "a name": "from planted.kernels.tile import product",
    "several, in brackets": "from planted.kernels.tile import (\n    product,\n    product as again,\n)",
    "a module of the package": "from planted.kernels import tile",
    "two modules": "from planted.kernels import other, tile",
    "a module by its name": "import planted.kernels.tile",
    "under another name": "import planted.kernels.tile as t",
    "beside others": "import os, planted.kernels.tile",
    "relative": "from . import tile",
    "a relative name": "from .tile import product",
    "in a function": "def f():\n    from planted.kernels.tile import product\n    return product",
    "after another statement": "x = 1; from planted.kernels.tile import product",
    "through another module": "from planted.kernels.other import more",
}


@pytest.mark.parametrize("words", IMPORTS.values(), ids=IMPORTS)
def test_every_form_of_import_is_followed(hash_of: Callable[..., str], words: str) -> None:
    files = {"kernels/top.py": f"{words}\n", "kernels/other.py": "from planted.kernels.tile import product as more\n"}
    before = hash_of(changed=files)
    assert before != hash_of(changed={**files, "kernels/tile.py": "def product(x):\n    return x * x * x\n"})
    assert before == hash_of(changed=files)


@pytest.mark.parametrize(
    "words",
    [
        "from planted.kernels.wing.deep import product",
        "from planted.kernels.wing import deep",
        "import planted.kernels.wing.deep",
    ],
)
def test_packages_below_are_followed(hash_of: Callable[..., str], words: str) -> None:
    files = {"kernels/top.py": f"{words}\n"}
    before = hash_of(changed=files)
    assert before != hash_of(changed={**files, "kernels/wing/deep.py": "def product(x):\n    return x\n"})
    assert before != hash_of(changed={**files, "kernels/wing/__init__.py": "x = 1\n"}), "importing runs the package too"
    assert before == hash_of(changed={**files, "kernels/other.py": "x = 2\n"}), "which nobody imports"


MOVES = {
    "what it imports, into a wing": {
        "kernels/top.py": FILES["kernels/top.py"].replace("kernels.tile", "kernels.wing.tile"),
        "kernels/wing/tile.py": FILES["kernels/tile.py"],
        "kernels/tile.py": None,
    },
    "what it imports, renamed": {
        "kernels/top.py": FILES["kernels/top.py"].replace("kernels.tile", "kernels.zzz"),
        "kernels/zzz.py": FILES["kernels/tile.py"],
        "kernels/tile.py": None,
    },
    "comments, docstrings and blank lines": {
        "kernels/top.py": FILES["kernels/top.py"].replace("    return", '    """A product."""\n\n    return'),
        "kernels/tile.py": FILES["kernels/tile.py"] + '\n# a comment\n"""And a text."""\n',
    },
    "carriage returns": {"kernels/tile.py": FILES["kernels/tile.py"].replace("\n", "\r\n")},
}


@pytest.mark.parametrize("changed", MOVES.values(), ids=MOVES)
def test_what_keeps_the_records(hash_of: Callable[..., str], changed: dict[str, str | None]) -> None:
    assert hash_of() == hash_of(changed=changed)


def test_a_moved_module_keeps_its_own_hash(hash_of: Callable[..., str]) -> None:
    before = hash_of()
    assert before == hash_of("wing.launch", {"kernels/wing/launch.py": FILES["kernels/top.py"], "kernels/top.py": None})


@pytest.mark.parametrize(
    "changed",
    [
        {"kernels/top.py": FILES["kernels/top.py"].replace("return product(x)", "return product(x + 1)")},
        {"kernels/top.py": FILES["kernels/top.py"].replace("product(x)", 'product("# " + x)')},
        {"kernels/top.py": FILES["kernels/top.py"].replace("kernels.tile", "kernels.other")},
        {"kernels/top.py": FILES["kernels/top.py"].replace("import product", "import product as p, product")},
    ],
    ids=["code", "a string with a hash sign", "another module's function of that name", "another name"],
)
def test_what_does_not(hash_of: Callable[..., str], changed: dict[str, str | None]) -> None:
    assert hash_of() != hash_of(changed=changed)


def test_the_same_names_of_two_modules_are_told_apart(hash_of: Callable[..., str]) -> None:
    both = "from planted.kernels.{} import product\nfrom planted.kernels.{} import product as more\n"
    assert hash_of(changed={"kernels/top.py": both.format("tile", "other")}) != hash_of(
        changed={"kernels/top.py": both.format("other", "tile")}
    )


def test_strings_keep_their_hash_signs(hash_of: Callable[..., str]) -> None:
    text = 'x = "# one"\ny = """\n# two\n"""\nz = f"{x}#three"\n'
    before = hash_of(changed={"kernels/top.py": text})
    for word in ("one", "two", "three"):
        assert before != hash_of(changed={"kernels/top.py": text.replace(word, "more")}), word


def test_a_module_without_a_file_has_none(hash_of: Callable[..., str]) -> None:
    hash_of()
    assert source_hash("planted.kernels.gone") == ""
    assert source_hash("no_such_package.kernels.gone") == ""
    assert source_hash("builtins") == ""


def test_real_kernels() -> None:
    assert len(source_hash("tilewright.kernels.gemm.tile")) == 16
    assert source_hash("tilewright.kernels.gemm.tile") != source_hash("tilewright.kernels.softmax.softmax")
