"""`tilewright serve` and `tilewright run`: a model over HTTP, or once on the terminal."""

import dataclasses
import json
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewright.cli.options import ConfigFile, Model, options
from tilewright.cli.root import Progress, app, ends_at_once, ends_on_sigterm, plain_errors, say
from tilewright.cli.serve_models import split_models
from tilewright.engine.config import EngineConfig
from tilewright.extras import require
from tilewright.host.config import HostConfig
from tilewright.server.config import ServerConfig
from tilewright.server.logs import Log

if TYPE_CHECKING:
    from tilewright.engine.llm import LLM
    from tilewright.engine.request import SamplingParams
    from tilewright.host.host import Host

__all__ = ["run", "serve"]

ORDINARY = "Ordinary models"
"""The panel of their options."""


def _load(model: str, options: Mapping[str, Any], progress: Callable[[str], None]) -> "LLM":
    with ends_at_once(signal.SIGINT):  # there is nothing to clean up yet, and the import of torch swallows exceptions
        from tilewright.engine.llm import LLM

        return LLM(model, progress=progress, **options)


def _loaded(model: str, options: Mapping[str, Any]) -> "LLM":
    """The model, with its progress on the terminal."""
    EngineConfig(model=model, **options)  # raises for wrong options before torch is imported
    started_s, progress = time.perf_counter(), Progress()
    say(f"Loading {model} ...")
    try:
        llm = _load(model, options, progress)
    finally:
        progress.end()
    say(f"Loaded in {time.perf_counter() - started_s:.1f} s")
    return llm


@app.command(
    epilog="[b]Examples[/b]\n\n"
    "tilewright serve\n\n"
    "tilewright serve ./my-model --port 9000 --max-seqs 64\n\n"
    "tilewright serve Qwen/Qwen3-0.6B --host 0.0.0.0 --api-key-file key.txt\n\n"
    "tilewright serve my_pkg.my_model:build --max-batch 128 --grpc-port 8001\n\n"
    "tilewright serve bookworm --repository ./models\n\n"
    "curl localhost:8000/v1/completions -H 'content-type: application/json' -d '{\"prompt\": \"Call me\"}'"
)
@options(EngineConfig, into="engine", panel="Engine", without={"model"})
@options(HostConfig, into="ordinary", panel=ORDINARY)
@options(ServerConfig, into="server")
def serve(
    context: typer.Context,
    server: dict[str, Any],
    ordinary: dict[str, Any],
    engine: dict[str, Any],
    model: Model = "bookworm",
    config: ConfigFile = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="read the API key from this file, so that it does not show in the process list")
    ] = None,
    served_name: Annotated[str | None, typer.Option(help="name of the model in the API; default: its own name")] = None,
    beside: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            metavar="[NAME=]SOURCE",
            help="also serve this ordinary model: MODULE:FUNCTION, or a folder written by `tilewright export`; "
            "may be given several times",
            rich_help_panel=ORDINARY,
        ),
    ] = None,
) -> None:
    """Serve a language model with OpenAI's API under /v1 and a playground at /, and ordinary models under /v2 and /predict.

    MODEL is a language model or an ordinary model. An ordinary model is a MODULE:FUNCTION that returns (torch.nn.Module,
    example inputs), or a folder written by `tilewright export`. With --model or --repository and without MODEL, no language
    model is served.

    The first Ctrl-C or SIGTERM lets running requests finish, a second one aborts them. While the model is still loading, the
    first one ends the command.
    """
    with plain_errors(context), ends_on_sigterm():
        if api_key_file is not None:
            if server["api_key"] is not None:
                raise typer.BadParameter("--api-key and --api-key-file are both given, wanted only one of them")
            server["api_key"] = _key_of(api_key_file)
        settings = ServerConfig(**server)
        own = HostConfig(**ordinary)
        source = context.get_parameter_source("model")
        # Compared by name: Typer may bring its own copy of Click, whose members differ from Click's.
        named = source is not None and source.name in ("COMMANDLINE", "DEFAULT_MAP")
        language, models = split_models(
            model, beside or (), repository=own.repository is not None, named=named, name=served_name
        )
        alone = not models and own.repository is None
        if alone and settings.grpc_port is not None:
            raise typer.BadParameter("--grpc-port is only for ordinary models; give one with --model or --repository")
        if alone and settings.shared_memory:
            raise typer.BadParameter("--shared-memory is only for ordinary models; give one with --model or --repository")
        if not alone and settings.replicas > 1 and not settings.ray:
            raise typer.BadParameter(
                "--replicas works only with a language model; serve ordinary models in a separate server, or with --ray"
            )
        with Log(settings.log_level, settings.log_format) as log:
            code = _serve(language, served_name, engine, settings, log, models, own)
    raise typer.Exit(code)


def _key_of(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except OSError as error:
        raise OSError(
            f"the API key cannot be read from {file}: {error.strerror}; wanted a file that contains the key"
        ) from None
    except ValueError:
        raise ValueError(f"the API key in {file} is not plain ASCII; wanted characters that an HTTP header can carry") from None


def _serve(
    model: str | None,
    served_name: str | None,
    engine: dict[str, Any],
    config: ServerConfig,
    log: Log,
    models: list[str],
    ordinary: HostConfig,
) -> int:
    """Load the models, serve them, and return the exit code."""
    require("tilewright serve", "fastapi", "uvicorn", "prometheus_client", "tokenizers")
    from tilewright.host.sources import host_of_sources
    from tilewright.server.cores import fronts_of
    from tilewright.server.serve import bind, run_server

    host = None if config.ray else host_of_sources(models, ordinary)
    listener = bind(config, listen=True)
    # This raises for wrong options before anything is started.
    options = None if model is None else EngineConfig(model=model, **engine)
    config = dataclasses.replace(config, fronts=fronts_of(config, options, beside=host is not None))
    _warn_of_strangers(config, log)
    if config.fronts and host is not None and model is not None:
        raise ValueError(
            "--fronts works only if the server has either a language model or ordinary models, not both; serve them in "
            "separate servers"
        )
    if config.fronts and model is None and config.traces is not None:
        raise ValueError("the front processes of ordinary models do not support traces; leave out --fronts or --traces")
    if config.ray and (engine.get("adapters") or engine.get("max_adapters") or config.adapter_dir):
        raise ValueError("LoRA adapters do not work with --ray; leave one of them out")
    if (config.replicas > 1 or config.ray) and options is not None and options.plan.ranks > 1:
        raise ValueError("--replicas and --ray start servers of one rank each; leave these out, or leave --tp and --pp out")
    if config.ray:
        return _serve_on_ray(model, served_name, engine, config, listener, log, models, ordinary)
    if model is None:
        from tilewright.server.v2.app import create_models_app

        assert host is not None
        return run_server(create_models_app(host, config), listener, log)
    name = served_name or _name_of(model)
    if config.replicas > 1:
        require("tilewright serve --replicas", "aiohttp")
        from tilewright.server.forward import serve_replicas

        return serve_replicas({"model": model, "name": name, "engine": engine}, config, listener, log)
    if config.fronts:
        return _serve_in_processes(model, name, engine, config, listener, log)
    return _serve_here(model, name, engine, config, listener, log, host)


def _serve_here(
    model: str,
    name: str,
    engine: dict[str, Any],
    config: ServerConfig,
    listener: socket.socket,
    log: Log,
    host: "Host | None",
) -> int:
    """Serve a language model in this process, together with the ordinary models of `host`; return the exit code."""
    from tilewright.server.cores import share_cores
    from tilewright.server.serve import run_server
    from tilewright.server.starting import Starting

    started_s = time.perf_counter()
    with Starting(config, listener, log.say, name) as starting:
        starting.stage("importing torch")
        llm = _load(model, engine, starting.stage)
    share_cores(llm)
    log.say(f"Loaded {name} in {time.perf_counter() - started_s:.1f} s")
    ids, outputs = llm.tokenizer.vocab_size, llm.engine.vocab_size
    if ids > outputs:
        log.say(
            f"warning: the tokenizer has {ids} tokens and the model {outputs}; texts with a token that the model "
            "does not have are refused. The tokenizer and the model come from different sources, or tokens were "
            "added to the tokenizer later"
        )
    from tilewright.server.app import create_app
    from tilewright.server.prompts import Served

    pooler = llm.pooler
    pooled = None if pooler is None else pooler.pooled
    served = Served.of(llm.engine, name, pooled=pooled, generates=llm.generates)
    app = create_app(llm.engine, served, config, None if pooler is None else pooler.run)
    if host is not None:
        from tilewright.server.v2.app import attach

        attach(app, host, config)
    return run_server(app, listener, log)


def _warn_of_strangers(config: ServerConfig, log: Log) -> None:
    if not config.loopback and config.api_key is None:
        log.say(
            f"warning: everybody who can reach {config.host} can use this server, because it has no API key; set one "
            "with --api-key-file, or listen on 127.0.0.1"
        )


def _name_of(model: str) -> str:
    """The name under which a model is served; for a folder, its name without the path."""
    return Path(model).resolve().name if Path(model).is_dir() else model


def _serve_on_ray(
    model: str | None,
    served_name: str | None,
    engine: dict[str, Any],
    config: ServerConfig,
    listener: socket.socket,
    log: Log,
    models: list[str],
    ordinary: HostConfig,
) -> int:
    """Serve with replicas of Ray Serve behind a front in this process; return the exit code."""
    require("tilewright serve --ray", "ray")
    from tilewright.extras import needed
    from tilewright.host.sources import sources_of

    sources_of(models, ordinary)  # raises for wrong models before anything is started
    name = "models" if model is None else served_name or _name_of(model)
    spec = {"language": model, "name": name, "engine": engine, "models": models, "ordinary": dataclasses.asdict(ordinary)}
    return needed("tilewright.server.on_ray.run", "ray").serve_on_ray(spec, config, listener, log)


def _serve_in_processes(
    model: str, name: str, engine: dict[str, Any], config: ServerConfig, listener: socket.socket, log: Log
) -> int:
    """Serve with an engine process and its fronts; return the exit code. This process loads no model."""
    require("tilewright serve --fronts", "zmq", "msgpack")
    from tilewright.server.supervisor import ENGINE, Supervisor, private_folder

    with private_folder() as folder:
        spec = {"model": model, "name": name, "options": engine}
        (folder / "engine.json").write_text(json.dumps(spec))
        return Supervisor(config, ENGINE, folder, listener, log).run(name)


SAMPLING = "Sampling"
_RUN_WITHOUT = {"model", "max_seqs", "max_waiting", "prefix_cache", "adapters", "max_adapters", "max_adapter_rank"}


@app.command(
    epilog="[b]Examples[/b]\n\n"
    'tilewright run --prompt "It was a dark"\n\n'
    'tilewright run ./my-model --chat --prompt "Why is the sky blue?" --temperature 0\n\n'
    "cat story.txt | tilewright run --max-tokens 200 > more.txt\n\n"
    'tilewright run --prompt "Once" --json | jq .timings'
)
@options(EngineConfig, into="engine", panel="Engine", without=_RUN_WITHOUT)
def run(
    context: typer.Context,
    engine: dict[str, Any],
    model: Model = "bookworm",
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="prompt to continue; default: read from stdin")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="apply the model's chat template to the prompt")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="print one JSON object at the end instead of streaming the text")
    ] = False,
    max_tokens: Annotated[int, typer.Option(help="most tokens to generate", rich_help_panel=SAMPLING)] = 128,
    temperature: Annotated[
        float, typer.Option(help="sampling temperature; 0: always take the most likely token", rich_help_panel=SAMPLING)
    ] = 1.0,
    top_p: Annotated[
        float,
        typer.Option(
            help="sample from the most likely tokens that together have this probability; 1: off", rich_help_panel=SAMPLING
        ),
    ] = 1.0,
    top_k: Annotated[int, typer.Option(help="sample from this many most likely tokens; 0: off", rich_help_panel=SAMPLING)] = 0,
    min_p: Annotated[
        float,
        typer.Option(help="drop tokens less likely than this share of the most likely token; 0: off", rich_help_panel=SAMPLING),
    ] = 0.0,
    seed: Annotated[int | None, typer.Option(help="the same seed gives the same text", rich_help_panel=SAMPLING)] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="stop before this text; may be given several times", rich_help_panel=SAMPLING)
    ] = None,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos", help="ignore the end-of-text token and generate --max-tokens tokens", rich_help_panel=SAMPLING
        ),
    ] = False,
) -> None:
    """Generate text once. The text is streamed to stdout, progress goes to stderr."""
    with plain_errors(context), ends_on_sigterm():
        if prompt is None and sys.stdin.isatty():
            raise typer.BadParameter("there is no prompt; give --prompt, or text on stdin")
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
        with ends_at_once(signal.SIGINT):  # an import may turn an interrupt into another error
            llm = _loaded(model, {**engine, "max_seqs": 1})
        _generate(llm, model, _prompt_ids(llm, text, chat=chat), params, as_json=as_json)


def _prompt_ids(llm: "LLM", text: str, *, chat: bool) -> list[int]:
    tokenizer = llm.tokenizer
    if chat:
        turn = {"role": "user", "content": text}
        return tokenizer.encode(tokenizer.apply_chat_template([turn]), add_special=False)
    ids = tokenizer.encode(text)
    if not ids and tokenizer.bos_id is None:
        raise ValueError("the prompt is empty, but the model has no BOS token to begin with; give some text")
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
        say(f"{len(ids)} tokens in {total_s:.2f} s{speed} ({finish_reason})")
        return
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids)}
    timings = {"first_token_s": first_s, "total_s": total_s, "tokens_per_s_after_first": rate}
    answer = {"model": model, "text": text, "token_ids": ids, "finish_reason": finish_reason}
    print(json.dumps({**answer, "usage": usage, "timings": timings}, ensure_ascii=False))
