"""The tokenizer of a model folder.

Reads `tokenizer.json` (the Hugging Face format of the `tokenizers` library), and these files if they exist:
`tokenizer_config.json`, `chat_template.jinja`, `generation_config.json` and `config.json`. Not supported: a folder with only a
SentencePiece `tokenizer.model`, or with its own tokenizer code. Nothing from a model folder is ever executed as Python.
"""

from pathlib import Path
from typing import Any

import tokenizers

from tilewright.engine.tokenizer import Tokenizer, TokenizerError
from tilewright.engine.trial import try_template
from tilewright.models.errors import ModelError
from tilewright.models.fields import check_generation
from tilewright.models.files import read_json, read_text

__all__ = ["load"]

SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def load(folder: str | Path) -> Tokenizer:
    """See `Tokenizer.load`."""
    folder = Path(folder)
    if not folder.is_dir():
        raise TokenizerError(f"{folder} is not a folder; wanted a model folder with a tokenizer.json")
    try:
        return _read(folder)
    except ModelError as error:  # its message has the path
        raise TokenizerError(str(error)) from error
    except ValueError as error:
        raise TokenizerError(f"{folder}: {error}") from error


def _read(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.exists():
        raise TokenizerError("has no tokenizer.json (a SentencePiece tokenizer.model alone is not enough; convert it)")
    backend = _backend(path)
    config = _json(folder / "tokenizer_config.json")
    special = {name: _content(config[name]) for name in SPECIAL if config.get(name) is not None}
    eos = None
    for name in ("generation_config.json", "config.json"):
        found = _json(folder / name)
        check_generation(found, name)
        eos = found.get("eos_token_id") if eos is None else eos
    eos_ids = () if eos is None else eos if isinstance(eos, list) else (eos,)
    template_path = folder / "chat_template.jinja"
    if template_path.exists():
        template = read_text(template_path)
    else:
        template = _default_template(config.get("chat_template"))
    if template is not None:
        try_template(template, special)
    return Tokenizer(backend, eos_ids=eos_ids, special_tokens=special, chat_template=template)


def _backend(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(read_text(path))
    except BaseException as error:
        # For a file that it does not understand, the library raises a plain Exception, or a PanicException, which is not a
        # subclass of Exception. Any other exception is not about the file.
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(f"{path.name} is not a tokenizer: {error}; fetch it again") from error


def _json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _content(token: Any) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise TokenizerError(
            f"a special token in tokenizer_config.json is {token!r}, wanted a string or an object with `content`"
        )
    return text


def _default_template(template: Any) -> str | None:
    """The template in tokenizer_config.json, which is a string, or a list of named templates with one named "default"."""
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise TokenizerError(f"the chat_template of tokenizer_config.json is a {type(template).__name__}, wanted a string")
    return template
