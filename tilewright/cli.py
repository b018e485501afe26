"""The command line: `tilewright serve | run | bench`.

Exit codes: 0 it worked, 1 it failed (one line on stderr says what, what it got, what it wanted and what to do), 2 the command
was misspelled, 130 Ctrl-C. Results go to stdout, everything else to stderr. `--traceback` shows where an error came from.

The options of a part are the fields of its config, made into options by `_options`. Nothing heavy is imported before a verb
needs it, so that `--help` is immediate.
"""

import dataclasses
import functools
import importlib.util
import inspect
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

try:
    import typer
except KeyboardInterrupt:  # the longest of the imports: Ctrl-C in it is no traceback either
    raise SystemExit(130) from None

from tilewright import __version__
from tilewright.engine.config import EngineConfig
from tilewright.server.config import ServerConfig

if TYPE_CHECKING:
    from tilewright.engine.llm import LLM
    from tilewright.engine.request import SamplingParams

__all__ = ["app", "main"]

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells count: 128 + SIGINT."""

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="GPU operators you can prove, and the engine that serves language models on them.",
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"tilewright {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="print the version", is_eager=True, callback=_version)] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="show the Python traceback of an error")] = False,
) -> None:
    context.obj = traceback


# Options from configs -------------------------------------------------------------------------------------------------

Verb = TypeVar("Verb", bound=Callable[..., Any])

# Options whose name or unit is friendlier than the field's: field -> (option, type, bytes in its unit).
FRIENDLY: dict[str, tuple[str, Any, int]] = {
    "kv_cache_bytes": ("kv_cache_gib", float | None, 2**30),
    "max_body_bytes": ("max_body_mib", int, 2**20),
    "max_waiting": ("queue", int, 1),
}


def _options(config: type, *, into: str, panel: str | None = None, without: Set[str] = frozenset()) -> Callable[[Verb], Verb]:
    """Give a verb the fields of `config` that have a help text as options; they arrive in its dict parameter `into`."""
    fields = [f for f in dataclasses.fields(config) if "help" in f.metadata and f.name not in without]
    made = {f.name: _option(f, panel) for f in fields}

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


def _option(field: dataclasses.Field[Any], panel: str | None) -> tuple[inspect.Parameter, int]:
    """(the parameter that Typer makes an option from, bytes in its unit)."""
    name, kind, unit = FRIENDLY.get(field.name, (field.name, field.type, 1))
    default: Any = field.default
    if unit != 1 and default is not None:
        default //= unit
    # Other fields are spoken of by their names, which are options here.
    words = re.sub(r"\b\w+_\w+\b", lambda word: "--" + word[0].replace("_", "-"), field.metadata["help"])
    words = words.replace("bytes", "GiB") if unit == 2**30 else words
    annotation = Annotated[kind, typer.Option(help=words, rich_help_panel=panel)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation), unit


Model = Annotated[str, typer.Argument(help="the embedded model's name, a model folder, or a name on the Hugging Face hub")]


# What verbs share -----------------------------------------------------------------------------------------------------


@contextmanager
def _plain_errors(context: typer.Context) -> Iterator[None]:
    """Turn what a user can cause into one line on stderr and exit code 1; leave bugs their traceback."""
    try:
        yield
    except KeyboardInterrupt:
        _say("interrupted")
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        # The reader of stdout has gone (`| head`); Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None
    except (ValueError, OSError, MemoryError) as error:
        if context.obj:
            raise
        _say(f"error: {error or type(error).__name__}")
        raise typer.Exit(1) from None


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class _Progress:
    """Words of a long task on stderr: on a terminal the line is written over, elsewhere only each new stage is a line."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._stage = ""

    def __call__(self, words: str) -> None:
        """Say where the task is."""
        stage = re.sub(r"[\d,.%/ ]+$", "", words)
        if self._terminal and "\n" not in words:
            print(f"\r\x1b[2K{words}", end="", file=sys.stderr, flush=True)
        elif stage != self._stage:
            _say(words)
        self._stage = stage

    def end(self) -> None:
        """The task is over: its line is cleared."""
        if self._terminal:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)


def _load(model: str, options: Mapping[str, Any]) -> "LLM":
    EngineConfig(model=model, **options)  # what is wrong with the options is said before torch is imported
    started_s = time.perf_counter()
    _say(f"Loading {model} ...")
    from tilewright.engine.llm import LLM

    progress = _Progress()
    try:
        llm = LLM(model, progress=progress, **options)
    finally:
        progress.end()
    _say(f"Loaded in {time.perf_counter() - started_s:.1f} s")
    return llm


# serve ----------------------------------------------------------------------------------------------------------------


@app.command(
    epilog="[b]Examples[/b]\n\n"
    "tilewright serve\n\n"
    "tilewright serve ./my-model --port 9000 --max-seqs 64\n\n"
    "tilewright serve Qwen/Qwen3-0.6B --host 0.0.0.0 --api-key-file key.txt\n\n"
    "curl localhost:8000/v1/completions -H 'content-type: application/json' -d '{\"prompt\": \"Call me\"}'"
)
@_options(EngineConfig, into="engine", panel="Engine", without={"model"})
@_options(ServerConfig, into="server")
def serve(
    context: typer.Context,
    server: dict[str, Any],
    engine: dict[str, Any],
    model: Model = "bookworm",
    api_key_file: Annotated[
        Path | None, typer.Option(help="the same from a file, which does not show in the process list")
    ] = None,
    served_name: Annotated[str | None, typer.Option(help="the model's name in the API; default: its own")] = None,
) -> None:
    """Serve a model: OpenAI's API under /v1, a playground at /.

    The first Ctrl-C or SIGTERM lets running requests finish, the second aborts them.
    """
    with _plain_errors(context):
        if api_key_file is not None:
            if server["api_key"] is not None:
                raise typer.BadParameter("--api-key and --api-key-file are both given, wanted one of them")
            server["api_key"] = api_key_file.read_text().strip()
        config = ServerConfig(**server)
        from tilewright.server.serve import bind, run_server

        listener = bind(config)
        llm = _load(model, engine)
        from tilewright.server.app import create_app
        from tilewright.server.prompts import Served

        # A folder is served under its own name, not under its path.
        name = served_name or (Path(model).resolve().name if Path(model).is_dir() else model)
        code = run_server(create_app(llm.engine, Served.of(llm.engine, name), config), listener, _say)
    raise typer.Exit(code)


# run ------------------------------------------------------------------------------------------------------------------

SAMPLING = "Sampling"


@app.command(
    epilog="[b]Examples[/b]\n\n"
    'tilewright run --prompt "It was a dark"\n\n'
    'tilewright run ./my-model --chat --prompt "Why is the sky blue?" --temperature 0\n\n'
    "cat story.txt | tilewright run --max-tokens 200 > more.txt\n\n"
    'tilewright run --prompt "Once" --json | jq .timings'
)
@_options(EngineConfig, into="engine", panel="Engine", without={"model", "max_seqs", "max_waiting", "prefix_cache"})
def run(
    context: typer.Context,
    engine: dict[str, Any],
    model: Model = "bookworm",
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="text to go on from; default: stdin")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="put the prompt into the model's chat template")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object instead of the text as it comes")] = False,
    max_tokens: Annotated[int, typer.Option(help="most tokens to generate", rich_help_panel=SAMPLING)] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token", rich_help_panel=SAMPLING)] = 1.0,
    top_p: Annotated[float, typer.Option(help="1 is off", rich_help_panel=SAMPLING)] = 1.0,
    top_k: Annotated[int, typer.Option(help="0 is off", rich_help_panel=SAMPLING)] = 0,
    min_p: Annotated[float, typer.Option(help="0 is off", rich_help_panel=SAMPLING)] = 0.0,
    seed: Annotated[int | None, typer.Option(help="the same seed gives the same text", rich_help_panel=SAMPLING)] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="end before this text; may be given several times", rich_help_panel=SAMPLING)
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="go on to --max-tokens", rich_help_panel=SAMPLING)] = False,
) -> None:
    """Generate text once: it streams to stdout as it comes, progress goes to stderr."""
    with _plain_errors(context):
        if prompt is None and sys.stdin.isatty():
            raise typer.BadParameter("no prompt: give --prompt, or text on stdin")
        text = sys.stdin.read() if prompt is None else prompt
        from tilewright.engine.request import SamplingParams

        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            seed=seed,
            stop=tuple(stop or ()),
            ignore_eos=ignore_eos,
        )
        llm = _load(model, {**engine, "max_seqs": 1})
        _generate(llm, model, _prompt_ids(llm, text, chat=chat), params, as_json=as_json)


def _prompt_ids(llm: "LLM", text: str, *, chat: bool) -> list[int]:
    tokenizer = llm.tokenizer
    if chat:
        turn = {"role": "user", "content": text}
        return tokenizer.encode(tokenizer.apply_chat_template([turn]), add_special=False)
    ids = tokenizer.encode(text)
    if not ids and tokenizer.bos_id is None:
        raise ValueError("the prompt is empty and the model has no BOS token to begin with; wanted some text")
    return ids or [tokenizer.bos_id]  # pyright: ignore[reportReturnType]


def _generate(llm: "LLM", model: str, prompt: list[int], params: "SamplingParams", *, as_json: bool) -> None:
    """Stream the text to stdout, or print one JSON object with text, tokens, usage and timings."""
    started_s = time.perf_counter()
    first_s = None
    text, ids, finish_reason = "", [], None
    for delta in llm.stream(prompt, params):
        if first_s is None and delta.token_ids:
            first_s = time.perf_counter() - started_s
        if delta.finish_reason == "error":
            raise ValueError(delta.error)
        text += delta.text
        ids += delta.token_ids
        finish_reason = delta.finish_reason
        if not as_json:
            print(delta.text, end="", flush=True)
    total_s = time.perf_counter() - started_s
    rate = (len(ids) - 1) / (total_s - first_s) if first_s is not None and len(ids) > 1 else None
    if not as_json:
        print(flush=True)
        speed = "" if rate is None else f", {rate:.1f} tokens/s after the first"
        _say(f"{len(ids)} tokens in {total_s:.2f} s{speed} ({finish_reason})")
        return
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids)}
    timings = {"first_token_s": first_s, "total_s": total_s, "tokens_per_s_after_first": rate}
    answer = {"model": model, "text": text, "token_ids": ids, "finish_reason": finish_reason}
    print(json.dumps({**answer, "usage": usage, "timings": timings}, ensure_ascii=False))


# bench ----------------------------------------------------------------------------------------------------------------

if importlib.util.find_spec("tilewright.bench") and importlib.util.find_spec("tilewright.bench.cli"):
    from tilewright.bench.cli import app as bench_app

    app.add_typer(bench_app, name="bench")


def main() -> None:
    """Entry point of the `tilewright` command."""
    try:
        app(prog_name="tilewright")
    except KeyboardInterrupt:  # before a verb has begun
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
