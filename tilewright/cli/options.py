"""Command-line options made from the fields of config dataclasses: every field with a help text becomes an option."""

import dataclasses
import difflib
import functools
import inspect
import re
import tomllib
from collections.abc import Callable, Set
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

__all__ = ["ConfigFile", "Model", "options"]

Verb = TypeVar("Verb", bound=Callable[..., Any])

# Options whose name or unit differs from the field's, to be easier to type: field -> (option, type, bytes in its unit).
FRIENDLY: dict[str, tuple[str, Any, int]] = {
    "kv_cache_bytes": ("kv_cache_gib", float | None, 2**30),
    "host_cache_bytes": ("host_cache_gib", float | None, 2**30),
    "max_body_bytes": ("max_body_mib", int, 2**20),
    "max_waiting": ("queue", int, 1),
    "max_wait_s": ("max_wait", float, 1),
    "drain_timeout_s": ("drain_timeout", float, 1),
    "scale_down_after_s": ("scale_down_after", float, 1),
    "max_delay_ms": ("max_delay", float, 1),
    "packages": ("package", list[str] | None, 1),
    "cors_origins": ("cors_origin", list[str] | None, 1),
    "adapters": ("adapter", list[str] | None, 1),
}


def options(config: type, *, into: str, panel: str | None = None, without: Set[str] = frozenset()) -> Callable[[Verb], Verb]:
    """Add an option to a verb for each field of `config` that has a help text. The dict parameter `into` gets their values."""
    fields = [f for f in dataclasses.fields(config) if "help" in f.metadata and f.name not in without]
    names = frozenset(f.name for f in dataclasses.fields(config))
    made = {f.name: _option(f, names, panel) for f in fields}

    def wrap(verb: Verb) -> Verb:
        own = inspect.signature(verb).parameters
        parameters = [own[name] for name in own if name != into] + [option for option, _ in made.values()]

        @functools.wraps(verb)
        def call(**given: Any) -> Any:
            values = {name: (given.pop(option.name), unit) for name, (option, unit) in made.items()}
            scaled = {name: v if v is None or unit == 1 else int(v * unit) for name, (v, unit) in values.items()}
            return verb(**given, **{into: scaled})

        # What Typer reads.
        call.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return call  # pyright: ignore[reportReturnType]

    return wrap


def _option(field: dataclasses.Field[Any], names: Set[str], panel: str | None) -> tuple[inspect.Parameter, int]:
    """(the parameter from which Typer makes an option, bytes in its unit). `names`: all fields of the config."""
    name, kind, unit = FRIENDLY.get(field.name, (field.name, field.type, 1))
    default: Any = field.default
    if unit != 1 and default is not None:
        default //= unit

    def spoken(word: re.Match[str]) -> str:
        """The option that stands for a field named in a help text."""
        other = FRIENDLY.get(word[0], (word[0],))[0]
        return "--" + other.replace("_", "-") if word[0] in names else word[0]

    words = re.sub(r"\b\w+_\w+\b", spoken, field.metadata["help"])
    words = words.replace("bytes", "GiB") if unit == 2**30 else words
    annotation = Annotated[kind, typer.Option(help=words, rich_help_panel=panel)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation), unit


def _read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Use the values of a TOML file as defaults of a verb's parameters; the command line takes precedence."""
    if path is None or context.resilient_parsing:
        return path
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise typer.BadParameter(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise typer.BadParameter(f"{path} is not valid TOML: {error}") from None
    known = {parameter.name for parameter in context.command.params} - {"config"}
    for name, value in values.items():
        if name not in known:
            close = difflib.get_close_matches(name, [one for one in known if one], 1)
            hint = f"did you mean {close[0]}?" if close else "the names are those of this command's options, with _ for -"
            raise typer.BadParameter(f"{path} has {name!r}, which is not an option of this command; {hint}")
        if isinstance(value, dict):
            raise typer.BadParameter(f"{path} has a table [{name}], but only plain values are allowed")
    context.default_map = {**(context.default_map or {}), **values}
    return path


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        is_eager=True, callback=_read_config, help="TOML file with values for these options; the command line takes precedence"
    ),
]

Model = Annotated[str, typer.Argument(help="bookworm (the embedded model), a model folder, or a name on the Hugging Face hub")]
