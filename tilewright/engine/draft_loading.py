"""Loads what guesses tokens ahead for a model: a small draft model, a draft head, or the model's own MTP layer."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from tilewright.engine.config import EngineConfig
from tilewright.engine.plan import MemoryPlan
from tilewright.engine.runner import ModelRunner
from tilewright.engine.tokenizer import Tokenizer
from tilewright.models import Model, ModelConfig, ModelError, empty_model, load_config, load_model, resolve
from tilewright.models.draft_head_files import HeadFiles, head_files, mtp_files
from tilewright.models.draft_heads import KeptStates

__all__ = ["Draft", "found_draft"]


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A draft model or draft head, found and checked, but not loaded yet."""

    name: str
    folder: Path
    config: ModelConfig
    head: HeadFiles | None
    """None for a whole model."""

    @property
    def kind(self) -> str:
        """The kind for messages: "model" or "head"."""
        return "model" if self.head is None else "head"

    def empty(self, dtype: torch.dtype) -> Model:
        """The draft on "meta", for the memory plan."""
        if self.head is not None:
            return cast(Model, self.head.build(dtype))
        return empty_model(self.config, device="meta", dtype=dtype)

    def beside(self, runner: ModelRunner, plan: MemoryPlan, make: Callable[[Model], ModelRunner]) -> ModelRunner:
        """Load the draft for the model of `runner`, before that runner's warm-up. `make` makes the draft's runner.

        Raises ValueError if a draft model has fewer positions than the longest context of the plan.
        """
        place: dict[str, Any] = {"device": runner.device, "dtype": runner.model.embed.weight.dtype}
        if self.head is None:
            positions = plan.max_model_len
            if self.config.max_position_embeddings < positions:
                raise ValueError(
                    f"draft is {self.name!r}, whose positions end at {self.config.max_position_embeddings}, and the model's "
                    f"contexts have up to {positions} tokens; set max_model_len to no more than that, or take another draft "
                    "model"
                )
            return make(load_model(self.folder, max_positions=positions, **place))
        head = self.head.load(runner.model, **place)
        states = KeptStates(pages=plan.num_pages, page_size=plan.page_size, numbers=head.kept_numbers, **place)
        runner.cache = cast(Any, head.attach(runner.model, runner.cache, states))
        return make(cast(Model, head))


def found_draft(options: EngineConfig, folder: Path | None, config: ModelConfig, tokenizer: Tokenizer | None) -> Draft | None:
    """The draft that `options` name for a model, or None. `folder`: the model's folder.

    Raises:
        ValueError: the draft has another vocabulary than the model, or does not fit for another reason (ModelError).
    """
    if options.speculate == "mtp":
        if folder is None:
            raise ModelError("speculate is 'mtp', wanted a model from a folder: random weights have no MTP layer")
        head = mtp_files(folder, config)
        return Draft(name=folder.name, folder=folder, config=head.config, head=head)
    if options.draft is None:
        return None
    name, folder = options.draft, resolve(options.draft)
    head = head_files(folder, config, options.max_model_len or config.max_position_embeddings)
    if head is not None:
        return Draft(name=name, folder=folder, config=head.config, head=head)
    draft = load_config(folder)
    theirs = Tokenizer.load(folder) if (folder / "tokenizer.json").exists() else None
    why = None
    if draft.vocab_size != config.vocab_size:
        why = f"has {draft.vocab_size} tokens, the model {config.vocab_size}"
    elif tokenizer is not None and theirs is not None and _numbers(tokenizer) != _numbers(theirs):
        why = "gives other numbers to its tokens than the model"
    if why is not None:
        raise ValueError(f"draft is {name!r}, which {why}; wanted a model with the same vocabulary, such as one of its family")
    return Draft(name=name, folder=folder, config=draft, head=None)


def _numbers(tokenizer: Tokenizer) -> tuple[Any, Any]:
    told = json.loads(tokenizer.to_json())
    return told["model"].get("vocab"), [(token["id"], token["content"]) for token in told.get("added_tokens", ())]
