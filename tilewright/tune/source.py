"""The hash of a kernel's source, by which rows that were measured with another source are recognised as old.

The hash covers the code of the implementation's module and of all kernel modules that it imports, directly or indirectly. It
does not cover comments, docstrings, blank lines, the order of imports, and the names of modules. So a file that is only moved
or renamed keeps the records of every kernel in it, because modules are identified by their content and by the content of their
imports.

Files are read and parsed, not imported. Not covered: code outside of the package's kernels, and names that a module uses only
as attributes of a package (`kernels.a.f` after `from tilewright import kernels`).
"""

import ast
import hashlib
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["source_hash"]

_STRINGS_AND_COMMENTS = re.compile(
    r'''("""(?:\\.|[^\\])*?"""|\'\'\'(?:\\.|[^\\])*?\'\'\'|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')|#[^\n]*''', re.DOTALL
)


@dataclass(frozen=True)
class _Imported:
    """A name that a module imports from a kernel module: the original name and the local one."""

    module: str
    name: str
    alias: str


@dataclass(frozen=True)
class _Module:
    """A kernel module: its code without the imports of other kernel modules, and these imports."""

    code: str
    imports: tuple[_Imported, ...]


@cache
def source_hash(module: str) -> str:
    """16 hex digits: a hash of the code of a kernel module and of all kernel modules that it imports, directly or indirectly.

    Args:
        module: its dotted name. Kernel modules are all modules below the first two parts of it ("tilewright.kernels").

    Returns:
        The hash, or "" if the module has no file.
    """
    root = ".".join(module.split(".")[:2])
    waiting, seen = [module], set()
    while waiting:
        name = waiting.pop()
        seen.add(name)
        read = _read(root, name)
        if read is None:
            if name == module:
                return ""
            continue
        needed = {imported.module for imported in read.imports} | set(_packages(root, name))
        waiting += needed - seen - set(waiting)
    contents = (_content(root, name) for name in seen)
    return _digest(*sorted(content for content in contents if content))


def _packages(root: str, module: str) -> Iterator[str]:
    """The packages between the kernels' root and a module; importing the module runs them."""
    below = module.removeprefix(root).split(".")[1:-1]
    for i in range(1, len(below) + 1):
        yield ".".join([root, *below[:i]])


def _content(root: str, name: str) -> str:
    """A module's code and imports as text; "" for a module without code."""
    read = _read(root, name)
    if read is None or not (read.code or read.imports):
        return ""
    taken = sorted(f"{_digest(_code(root, i.module))} {i.name} {i.alias}" for i in read.imports)
    return "\n".join([read.code, *taken])


def _code(root: str, name: str) -> str:
    read = _read(root, name)
    return "" if read is None else read.code


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


@cache
def _root(root: str) -> Path | None:
    """The folder of the kernels, or the file if they are one module."""
    try:
        spec = importlib.util.find_spec(root)
    except (ModuleNotFoundError, ValueError):  # no such package; a script, which has no spec
        return None
    if spec is not None and spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    return None if spec is None or spec.origin is None else Path(spec.origin)


def _file(root: str, name: str) -> Path | None:
    """The file of a module or package of the kernels."""
    place = _root(root)
    if place is None or (name != root and not name.startswith(f"{root}.")):
        return None
    if place.is_file():
        return place if name == root else None
    place = place.joinpath(*name.removeprefix(root).split(".")[1:])
    return next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()), None)


@cache
def _read(root: str, name: str) -> _Module | None:
    """A kernel module, or None if there is no such file."""
    path = _file(root, name)
    if path is None:
        return None
    text = path.read_text(encoding="utf-8")
    lines, imports = text.splitlines(), []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            _cut(lines, node)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found = [i for i in _imported(node, name, path.name == "__init__.py") if _file(root, i.module) is not None]
            if found:
                imports += [_exact(root, i) for i in found]
                _cut(lines, node)
    code = _STRINGS_AND_COMMENTS.sub(lambda match: match[1] or "", "\n".join(lines))
    kept = (line.rstrip() for line in code.splitlines())
    return _Module("\n".join(line for line in kept if line), tuple(imports))


def _cut(lines: list[str], node: ast.stmt) -> None:
    """Blank out a statement; if it shares its line with others, only its own part."""
    first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
    # Columns of syntax trees count bytes.
    before = lines[first].encode()[: node.col_offset].decode()
    after = lines[last].encode()[node.end_col_offset :].decode()
    lines[first : last + 1] = [before + after, *[""] * (last - first)]


def _imported(node: ast.Import | ast.ImportFrom, module: str, is_package: bool) -> Iterator[_Imported]:
    """The names that a statement imports, each with the module that it names."""
    if isinstance(node, ast.Import):
        yield from (_Imported(alias.name, "", alias.asname or alias.name) for alias in node.names)
        return
    base = node.module or ""
    if node.level:
        parts = module.split(".")
        above = parts[: len(parts) - node.level + is_package]
        base = ".".join([*above, *([node.module] if node.module else [])])
    yield from (_Imported(base, alias.name, alias.asname or alias.name) for alias in node.names)


def _exact(root: str, imported: _Imported) -> _Imported:
    """If `from package import submodule` names a submodule, the same import with the submodule as its module."""
    below = f"{imported.module}.{imported.name}"
    if imported.name and _file(root, below) is not None:
        return _Imported(below, "", imported.alias)
    return imported
