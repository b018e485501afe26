"""Pages of the documentation site that are made from the code: the commands, the operators, the changelog.

A hook of MkDocs (mkdocs.yml names it). The pages exist in the built site only, so they cannot be older than the code.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from typer.main import get_command

ROOT = Path(__file__).resolve().parent.parent
COMMANDS_HEAD = """# Commands

Exit codes: 0 it worked, 1 it failed (one line on stderr says why and what to do), 2 wrong usage, 130 Ctrl-C, 143 SIGTERM.
Results go to stdout, everything else to stderr. `tilewright --traceback COMMAND` shows where an error came from.
"""
OPERATORS_HEAD = """# Operators

The functions of `tilewright.ops`. Shapes are written in brackets; a name such as `...` stands for any leading dimensions.
`tilewright ops` lists the implementations behind them, `tilewright explain OP ...` says which one a call takes.
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to the site."""
    pages = {
        "reference/cli.md": commands_page(),
        "reference/operators.md": operators_page(),
        "changelog.md": (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"),
    }
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def commands_page() -> str:
    """The reference of the command line, from the commands' own declarations."""
    from tilewright.cli import app

    parts = [COMMANDS_HEAD]
    for path, command in _walk(get_command(app), ()):
        parts.append(_command(path, command))
    return "\n".join(parts)


def operators_page() -> str:
    """One entry for each public function of `tilewright.ops`; mkdocstrings fills in signature and docstring."""
    from tilewright import ops

    names = [name for name in ops.__all__ if callable(getattr(ops, name))]
    return "\n".join([OPERATORS_HEAD, *[f"::: tilewright.ops.{name}\n" for name in names]])


def _walk(command: Any, path: tuple[str, ...]) -> list[tuple[tuple[str, ...], Any]]:
    """Every command that does something, with its words, in the order of `--help`."""
    found = [(path, command)] if path and (not hasattr(command, "commands") or command.invoke_without_command) else []
    for name, inner in getattr(command, "commands", {}).items():
        found += [] if inner.hidden else _walk(inner, (*path, name))
    return found


def _command(path: tuple[str, ...], command: Any) -> str:
    name = f"tilewright {' '.join(path)}"
    context = command.make_context(name, [], resilient_parsing=True)
    usage = " ".join(command.collect_usage_pieces(context))
    lines = [f"## {name}", "", _plain(command.help or ""), "", f"    {name} {usage}", ""]
    rows = [_row(param) for param in command.params if not getattr(param, "hidden", False)]
    if rows:
        lines += ["| argument or option | meaning | default |", "|---|---|---|", *rows, ""]
    if command.epilog:
        lines += [_epilog(command.epilog), ""]
    return "\n".join(lines)


def _row(param: Any) -> str:
    if param.param_type_name == "argument":
        name = f"`{(param.metavar or param.name).upper()}`"
    else:
        value = "" if param.is_flag else f" {param.metavar or param.display_type}"
        name = ", ".join(f"`{option}{value}`" for option in [*param.opts, *param.secondary_opts])
    default = param.default
    shown = (
        "" if default is None or callable(default) or default in ((), [], False) else f"`{getattr(default, 'value', default)}`"
    )
    meaning = "; ".join(_plain(param.help or "").splitlines())
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in (name, meaning, shown))} |"


def _epilog(text: str) -> str:
    """A heading in bold, and each example as a line of code."""
    blocks = [block.strip() for block in text.split("\n\n") if block.strip()]
    lines = []
    for block in blocks:
        head = re.fullmatch(r"\[b\](.*)\[/b\]", block)
        lines.append(f"**{head[1]}**\n" if head else f"    {_plain(block)}")
    return "\n".join(lines)


def _plain(text: str) -> str:
    """Without the markup of rich, which help texts may have."""
    return re.sub(r"\[/?(?:b|bold|i|dim|cyan)\]", "", text).strip()
