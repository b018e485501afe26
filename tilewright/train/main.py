"""`train(config)`: runs a whole training run, from a config to a trained model in a folder."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tilewright.data.compressed import Limits
from tilewright.data.read import documents, format_of
from tilewright.data.shards import TokenShards
from tilewright.extras import needed
from tilewright.models import SHAPES, Model, ModelError, load_config, resolve
from tilewright.models.files import read_json
from tilewright.parallel.mesh import Mesh
from tilewright.parallel.plan import Plan
from tilewright.train.batch import pack
from tilewright.train.captured import Captured, check_graphs
from tilewright.train.compute import set_compute
from tilewright.train.config import TrainConfig, to_toml
from tilewright.train.data import Conversations, Marked, Mixture, Source, Texts, conversation_shards, text_shards
from tilewright.train.loop import Held, Run, Summary, resume, save_whole
from tilewright.train.lora import save_trained
from tilewright.train.pairs import Pairs, pair_shards
from tilewright.train.preference import pack_pairs
from tilewright.train.ranks import check_plan, joined, make_spread, on_this_rank, plan_lines, quiet
from tilewright.train.setup import (
    build_model,
    build_objective,
    build_optimizer,
    costs_of,
    device_for,
    model_config,
    plan_memory,
    planned_model,
)
from tilewright.train.step import loss_and_grads

__all__ = ["Encoder", "tokenizer_folder", "train"]

_LARGE_SHARE = 0.3
"""A document with more than this share of the held-out text causes a message."""

Render = Callable[[list[dict[str, Any]]], Marked]


class Encoder:
    """Converts texts to the tokens of documents. A document includes the tokens that the tokenizer adds, and ends with the
    end-of-text token, if there is one.

    Args:
        folder: contains tokenizer.json, and tokenizer_config.json or config.json with the end-of-text token.

    Raises:
        ModelError: tokenizer.json does not exist or is invalid.
    """

    def __init__(self, folder: Path):
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{folder} has no tokenizer.json; set tokenizer to a folder that has one")
        library = needed("tokenizers", "llm")
        try:
            self._backend = library.Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises nothing more specific
            raise ModelError(f"{path} is not a valid tokenizer: {error}") from error
        self._backend.no_truncation()
        self._backend.no_padding()
        self.vocab_size = 1 + max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.end = self._end(folder)
        self.identity = f"{hash_of(path)} end {self.end}"

    def _end(self, folder: Path) -> int | None:
        settings = folder / "tokenizer_config.json"
        token = read_json(settings).get("eos_token") if settings.is_file() else None
        token = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(token, str):
            return self._backend.token_to_id(token)
        ids = load_config(folder).eos_token_ids if (folder / "config.json").is_file() else ()
        return ids[0] if ids else None

    def pair(self, prompt: str, answer: str) -> Marked:
        """The tokens of a prompt and its answer. The answer ends with the end-of-text token, and only it has a loss."""
        ends = [] if self.end is None else [self.end]
        before = self._backend.encode(prompt, add_special_tokens=True).ids
        before = before[:-1] if ends and before[-1:] == ends else before
        return [(before, False), ([*self._backend.encode(answer, add_special_tokens=False).ids, *ends], True)]

    def __call__(self, texts: Sequence[str]) -> Iterator[list[int]]:
        """The tokens of each text."""
        ends = [] if self.end is None else [self.end]
        for encoding in self._backend.encode_batch_fast(list(texts), add_special_tokens=True):
            ids = encoding.ids
            yield ids if ends and ids[-1:] == ends else [*ids, *ends]


def hash_of(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def tokenizer_folder(config: TrainConfig) -> Path | None:
    """The folder of the tokenizer; None for a model shape that has no tokenizer. Raises ModelError if the folder cannot be
    found."""
    if config.tokenizer is not None:
        return resolve(config.tokenizer)
    return None if config.model in SHAPES else resolve(config.model)


def train(
    config: TrainConfig, *, render: Render | None = None, sampler: Callable[[Model], Callable[[], str]] | None = None,
    say: Callable[[str], None] = print,
) -> Summary:  # fmt: skip
    """Train a model, or continue a run that was stopped, from the last checkpoint in `config.out`.

    Writes checkpoints, log.jsonl and config.toml. At the end it writes `model/`, a Hugging Face folder, or `adapter/`, a peft
    folder.

    Args:
        render: messages -> tokens with the answers marked. Required if `config.chat` is set.
        sampler: model -> a function that writes a text with the current weights of the model.
        say: called with progress messages, one line each.

    Raises:
        FloatingPointError: gradients were not finite in too many successive updates.
        ModelError: the model cannot be loaded or trained.
        OSError: files cannot be read or written.
        ValueError: the config contradicts the model, the data, the device, or the checkpoint.
    """
    shape = model_config(config)
    check_plan(config, shape)
    device = on_this_rank(config, device_for(config))
    check_graphs(config, shape, device)
    with joined(config, device) as mesh:
        say = say if mesh.rank == 0 else quiet
        say(to_toml(config).rstrip())
        empty = planned_model(config)
        lines = [str(plan_memory(config, empty, device))] if config.parallel == Plan() else plan_lines(config, empty, device)
        say("\n".join(lines))
        # The first rank makes the shards. The other ranks then use the same shards.
        data, held = mesh.world.first(lambda: _data(config, shape.vocab_size, render, say))
        run = _run(config, mesh, device, data, held, sampler, say)
        if config.lora_dropout:
            torch.manual_seed(config.seed)  # for the dropout masks; a checkpoint contains the state of the generator
        if resume(run):
            say(f"continuing after step {run.step}")
        # Only now: if the config is refused, the file must still describe the run whose checkpoints are in the folder.
        if mesh.rank == 0:
            (Path(config.out) / "config.toml").write_text(to_toml(config), encoding="utf-8")
        summary = run.train()
        saved = Path(config.out) / ("adapter" if config.lora_rank else "model")
        if config.lora_rank:
            if run.is_first:
                save_trained(config, run.model, saved)
            mesh.world.first(lambda: None)
        else:
            save_whole(run, saved, tokenizer_folder(config))
        say(f"saved {saved}")
    return summary


def _run(
    config: TrainConfig, mesh: Mesh, device: torch.device, data: Mixture, held: Held | None,
    sampler: Callable[[Model], Callable[[], str]] | None, say: Callable[[str], None],
) -> Run:  # fmt: skip
    model = build_model(config, device)
    for line in set_compute(config, model, device):
        say(line)
    costs, spread = costs_of(config, model, device), make_spread(config, model, mesh)
    optimizer = build_optimizer(config, model, None if spread is None else spread.weights())
    if spread is not None:
        spread.share()
        model = spread.part.model
    return Run(
        config=config, model=model, optimizer=optimizer, data=data, costs=costs, device=device, say=say, held=held,
        spread=spread, passes=Captured(config.row_tokens, say=say) if config.graphs else loss_and_grads,
        objective=build_objective(config, device, mesh.dp), pack=pack if config.loss == "next-token" else pack_pairs,
        sample=None if sampler is None or not config.sample_every or mesh.rank else sampler(model),
    )  # fmt: skip


def _data(
    config: TrainConfig, vocab_size: int, render: Render | None, say: Callable[[str], None]
) -> tuple[Mixture, Held | None]:
    """The data sources of a config, and the held-out texts."""
    if not config.data:
        raise ValueError("data is empty; give files of documents, or folders of token shards")
    home, at = Path(config.out) / "data", tokenizer_folder(config)
    seed = config.seed if config.shuffle else None
    encoder = None if at is None or not (at / "tokenizer.json").is_file() else Encoder(at)
    if encoder is not None and encoder.vocab_size > vocab_size:
        raise ValueError(
            f"the tokenizer has {encoder.vocab_size} tokens, but the model only {vocab_size}; use the model's own tokenizer"
        )

    def shards(path: Path) -> TokenShards:
        if encoder is None:
            raise ValueError(f"{path} is text, but {config.model} has no tokenizer; set tokenizer to a folder that has one")
        return text_shards(
            [path], encoder, vocab_size, home, identity=encoder.identity, text_field=config.text_field, progress=say
        )

    def texts(made: TokenShards, name: str) -> Texts:
        found = Texts(made, seed, name, config.piece_tokens)
        update = config.row_tokens * config.micro_rows * config.micro_batches * config.parallel.dp
        if config.shuffle and found.piece_tokens > update:
            say(
                f"{name}: an update reads {update:,} tokens, and a document has {found.piece_tokens:,.0f} on average: "
                f"most updates see one document alone. piece_tokens = {config.row_tokens} shuffles pieces instead\n"
            )
        return found

    def source(path: Path) -> Source:
        if not path.exists():
            raise FileNotFoundError(f"data: {path} does not exist")
        if config.loss != "next-token":
            if encoder is None or at is None or path.is_dir():
                raise ValueError(f"{path}: loss {config.loss} needs a file of pairs, and a model with a tokenizer")
            identity = f"{encoder.identity} {_template_identity(at)}"
            pairs = pair_shards([path], encoder.pair, render, vocab_size, home, identity=identity)
            return Pairs(*pairs, seed, config.row_tokens, str(path))
        if path.is_dir():
            return texts(TokenShards(path), str(path))
        if not config.chat:
            return texts(shards(path), str(path))
        if render is None or encoder is None or at is None:
            raise ValueError("chat needs a tokenizer with a chat template; set tokenizer to a folder that has one")
        identity = f"{encoder.identity} {_template_identity(at)}"
        tokens, answers = conversation_shards([path], render, vocab_size, home, identity=identity)
        return Conversations(tokens, answers, seed, str(path))

    mixture = Mixture([source(Path(name)) for name in config.data], config.weights)
    return mixture, None if config.eval_data is None else _held(Path(config.eval_data), shards, config, say)


def _template_identity(folder: Path) -> str:
    """Hashes of the files that may contain a chat template. With another template, conversations have other tokens."""
    files = (folder / name for name in ("tokenizer_config.json", "chat_template.jinja"))
    return " ".join(hash_of(path) for path in files if path.is_file())


def _held(
    path: Path, shards: Callable[[Path], TokenShards], config: TrainConfig, say: Callable[[str], None]
) -> Held:  # fmt: skip
    made = shards(path)
    found = documents(path, format_of(path), Limits(), Counter(), text_field=config.text_field)
    sizes = [len(document.text.encode()) for document in found]
    size = sum(sizes)
    if len(sizes) > 1 and not config.eval_rows and max(sizes) > _LARGE_SHARE * size:
        say(f"{path}: one of {len(sizes)} documents has {max(sizes) / size:.0%} of the text, so the loss depends on it most\n")
    return Held(texts=Texts(made, None, str(path)), tokens=len(made), bytes_per_token=size / len(made))
