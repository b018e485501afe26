"""The serving engine on a model that another component owns and changes: samples during training, with the current weights."""

from collections.abc import Callable

from tilewright.engine.blocks import BlockPool
from tilewright.engine.config import EngineConfig
from tilewright.engine.core import Engine
from tilewright.engine.loading import runner_of
from tilewright.engine.request import SamplingParams
from tilewright.engine.schedule import Scheduler
from tilewright.engine.tokenizer import Tokenizer
from tilewright.models import Model

__all__ = ["live_sampler"]

_PAGE_SIZE = 16


def live_sampler(model: Model, tokenizer: Tokenizer, prompt: str, max_tokens: int) -> Callable[[], str]:
    """A function that continues `prompt` with the weights that the model has when the function is called.

    The same weights generate the same text. The KV cache for one sequence is allocated here.

    Raises:
        ValueError: the prompt and `max_tokens` exceed the model's positions, or the prompt is empty and there is no token to
            begin with.
    """
    ids = tokenizer.encode(prompt) or list(tokenizer.eos_ids[:1])
    longest = len(ids) + max_tokens
    if not ids:
        raise ValueError("a sample needs a prompt: the tokenizer has no token that begins a text")
    if longest > model.config.max_position_embeddings:
        raise ValueError(
            f"a sample of {len(ids)} tokens and {max_tokens} more is longer than the model's "
            f"{model.config.max_position_embeddings} positions; ask for fewer"
        )
    # Pages are not shared between samples: keys and values computed with other weights are wrong.
    options = EngineConfig(max_seqs=1, page_size=_PAGE_SIZE, max_tokens_per_step=max(256, len(ids)), prefix_cache=False)
    pages = -(-longest // _PAGE_SIZE) + 1
    scheduler = Scheduler(
        blocks=BlockPool(pages, _PAGE_SIZE, prefix_cache=False), max_seqs=1, max_tokens_per_step=options.max_tokens_per_step,
        max_model_len=longest, max_waiting=1, prefill_chunk=None,
    )  # fmt: skip
    runner = runner_of(model, pages, longest, options)
    engine = Engine(runner, tokenizer, tokenizer.eos_ids, scheduler, vocab_size=model.config.vocab_size)

    def sample() -> str:
        engine.submit(ids, SamplingParams(max_tokens=max_tokens, temperature=0.8, seed=0))
        written = []
        while engine.has_work:
            written += [delta.text or "" for delta in engine.step()]
        return "".join(written)

    return sample
