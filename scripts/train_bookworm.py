"""Train `bookworm`, the embedded Llama model of at most 10 M parameters, from public-domain books, on one GPU in one command.

    python scripts/train_bookworm.py --train TRAIN.jsonl.xz --val VAL.jsonl.xz --out DIR --time-budget-s 570

Stages: read the books, train a byte-level BPE tokenizer (or load one), tokenise, train until the time budget ends, save a
Hugging Face folder, load it again and measure bits per byte. It is plain PyTorch and uses none of tilewright's kernels:
they serve the model, so what they compute can be checked against weights that they had no part in.

A *document* is one book's `text` with CRLF line ends turned into LF, and nothing else changed. Bits per byte is
  (nats of all document tokens + one end-of-text token a document) / ln 2 / (UTF-8 bytes of the documents),
over the whole validation set with the saved bfloat16 weights, so the tokenizer cannot flatter it. A window opens with
<|bos|>, in training, validation and use alike; the headline number is for non-overlapping windows of the full context,
`val_bits_per_byte_sliding` for windows moved by half a context. Validation books never choose anything.

Not supported: resuming, several GPUs, dropout, anything that LlamaForCausalLM cannot express.

Shapes: B windows, T positions, E hidden, H query heads, G kv heads, D head dim, V vocabulary.
"""

import argparse
import json
import lzma
import math
import platform
import sys
import time
from pathlib import Path

import numpy as np
import safetensors
import tokenizers
import torch
import torch.nn.functional as F
from bookworm_model import Llama, Optimiser, nats, sample
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor

START_S = time.perf_counter()  # after the imports, which take some seconds on a cold machine
BOS, EOS = "<|bos|>", "<|eos|>"
BOS_ID, EOS_ID = 0, 1
# Words with their leading space or quote, numbers of up to 3 digits, runs of punctuation, runs of line ends: on these books
# 2.5% fewer tokens than GPT-2's pattern at 4096 entries, because a paragraph break is one token and not two.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# A base model only continues text: the conversation becomes paragraphs and the reply is the next paragraph.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "{% if not loop.last or add_generation_prompt %}{{ '\\n\\n' }}{% endif %}{% endfor %}"
)
CALIBRATION = (20, 60)  # steps between which the speed is measured: after compiling, inside the warm-up
FINISH_S = 25.0  # kept back for saving and the final evaluation (measured: a few seconds)


def say(text: str) -> None:
    print(f"[{time.perf_counter() - START_S:6.1f}s] {text}", flush=True)


# ---- data ----------------------------------------------------------------------------------------------------------


def read_documents(path: Path, limit: int | None = None) -> list[str]:
    """Read the documents (see the module's docstring for what one is) of a .jsonl or .jsonl.xz file."""
    opener = lzma.open if path.suffix == ".xz" else open
    with opener(path, "rt", encoding="utf-8", newline="\n") as lines:
        rows = [line for line, _ in zip(lines, range(limit if limit else sys.maxsize), strict=False)]
    return [json.loads(row)["text"].replace("\r\n", "\n") for row in rows]


def train_tokenizer(documents: list[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE with exactly `vocab_size` entries, <|bos|> and <|eos|> among them; encode() puts <|bos|> first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[BOS, EOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, BOS_ID)]
    )
    return tokenizer


def tokenise(tokenizer: Tokenizer, documents: list[str]) -> list[np.ndarray]:
    """Token ids (int32) of each document, <|eos|> last and no <|bos|>. All cores work: `tokenizers` runs threads."""
    out = []
    for first in range(0, len(documents), 128):  # bounds the memory that the encodings' offsets take
        encodings = tokenizer.encode_batch_fast(documents[first : first + 128], add_special_tokens=False)
        out += [np.array([*encoding.ids, EOS_ID], dtype=np.int32) for encoding in encodings]
    return out


class Windows:
    """Endless training batches: each epoch cuts the stream at a new offset into windows of T and shuffles them."""

    def __init__(self, stream: np.ndarray, windows: int, length: int, seed: int, device: torch.device) -> None:
        self.stream = torch.from_numpy(stream).to(device)
        self.windows, self.length, self.device = windows, length, device
        self.random = np.random.default_rng(seed)
        self.starts = np.empty(0, dtype=np.int64)

    def next(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets, both [B, T] int64: the inputs are <|bos|> and the targets moved by one."""
        while len(self.starts) < self.windows:
            offset = self.random.integers(self.length)
            epoch = np.arange(offset, len(self.stream) - self.length, self.length)
            self.starts = np.concatenate((self.starts, self.random.permutation(epoch)))
        picked, self.starts = self.starts[: self.windows], self.starts[self.windows :]
        first = torch.from_numpy(picked).to(self.device, non_blocking=True)
        targets = self.stream[first[:, None] + torch.arange(self.length, device=self.device)].long()
        return F.pad(targets[:, :-1], (1, 0), value=BOS_ID), targets


# ---- files ---------------------------------------------------------------------------------------------------------


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def save_weights(out: Path, model: Llama, max_shard_mib: float | None) -> None:
    """bfloat16 weights in one file, or in Hugging Face's sharded layout with files of at most `max_shard_mib` MiB."""
    tensors = {name: p.detach().to("cpu", torch.bfloat16).contiguous() for name, p in model.state_dict().items()}
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in tensors.items():
        used = sum(t.nbytes for t in shards[-1].values()) + 64 * 1024  # the header
        if max_shard_mib and shards[-1] and used + tensor.nbytes > max_shard_mib * 2**20:
            shards.append({})
        shards[-1][name] = tensor
    if len(shards) == 1:
        return save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": {}}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, out / file, metadata={"format": "pt"})
        index["weight_map"] |= dict.fromkeys(shard, file)
    return write_json(out / "model.safetensors.index.json", index)


def load_weights(folder: Path) -> dict[str, Tensor]:
    """The tensors of `folder`, sharded or not."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return load_file(folder / "model.safetensors")
    files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    return {name: tensor for file in files for name, tensor in load_file(folder / file).items()}


def join(folder: Path) -> None:
    """Turn the sharded files of `folder` into one model.safetensors and remove them."""
    index = folder / "model.safetensors.index.json"
    files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    save_file(load_weights(folder), folder / "model.safetensors", metadata={"format": "pt"})
    for name in (*files, index.name):
        (folder / name).unlink()
    say(f"joined {len(files)} shards into {folder / 'model.safetensors'}")


def save_settings(out: Path, config: dict, tokenizer: Tokenizer) -> None:
    """Everything of the folder but the weights and metrics.json."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    write_json(out / "config.json", config)
    ends = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID}
    write_json(out / "generation_config.json", {**ends, "do_sample": True, "temperature": 0.8, "top_p": 0.95})
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(out / "tokenizer_config.json", settings)


def model_config(a: argparse.Namespace) -> dict:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": a.hidden,
        "intermediate_size": a.ffn,
        "num_hidden_layers": a.layers,
        "num_attention_heads": a.heads,
        "num_key_value_heads": a.kv_heads,
        "head_dim": a.head_dim,
        "vocab_size": a.vocab,
        "max_position_embeddings": a.context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "attention_bias": False,
        "mlp_bias": False,
    }


def evaluate(out: Path, config: dict, val: list[str], device: torch.device) -> dict:
    """Bits per byte of the folder `out`, from its own files: bfloat16 weights, tokenizer."""
    weights = load_weights(out)
    ids = tokenise(Tokenizer.from_file(str(out / "tokenizer.json")), val)
    length, count_bytes = config["max_position_embeddings"], sum(len(text.encode()) for text in val)
    model = Llama(config, torch.bfloat16 if device.type == "cuda" else torch.float32).to(device)
    model.load_state_dict(weights)
    total, count = nats(model, ids, length, length)
    sliding, _ = nats(model, ids, length, length // 2)
    model.compute = torch.float32
    exact, _ = nats(model, ids, length, length)
    return {
        "val_bits_per_byte": total / math.log(2) / count_bytes,
        "val_bits_per_byte_sliding": sliding / math.log(2) / count_bytes,
        "val_bits_per_byte_float32_compute": exact / math.log(2) / count_bytes,
        "val_nats_per_token": total / count,
        "val_tokens": count,
        "val_bytes": count_bytes,
        "val_documents": len(val),
        "val_window_tokens": length,
    }


# ---- training ------------------------------------------------------------------------------------------------------


def schedule(step: int, steps: int | None, warmup: int, decay: float) -> float:
    """Learning-rate factor: linear warm-up, flat, linear to zero over the last `decay` of `steps` (None: not known yet)."""
    up = min(1.0, (step + 1) / warmup)
    return up if steps is None else min(up, max(0.0, (steps - step) / (decay * steps)))


def fit(a: argparse.Namespace, model: Llama, windows: Windows, val_ids: list[np.ndarray], bytes_a_token: float) -> dict:
    """Train until the budget ends, or for exactly --steps; leaves a checkpoint in --out every --save-every-s."""
    optimiser = Optimiser(model, a.lr_matrix, a.lr_embed, a.weight_decay)
    loss_of = torch.compile(model.loss) if a.compile else model.loss
    deadline_s = START_S + a.time_budget_s - FINISH_S
    steps, step, curve = a.steps, 0, []
    train_start_s = calibrated_s = time.perf_counter()
    next_say_s, next_save_s = train_start_s, train_start_s + a.save_every_s
    while steps is None or step < steps:
        factor = schedule(step, steps, a.warmup, a.decay)
        loss = loss_of(*windows.next())
        loss.backward()
        optimiser.step(factor, momentum=0.85 + 0.10 * min(1.0, step / 300))
        step += 1
        if step % 10 and step != steps:
            continue
        loss_nats, now_s = loss.item(), time.perf_counter()  # waits for the device, so the clock is honest
        if not math.isfinite(loss_nats):
            raise FloatingPointError(f"loss is {loss_nats} at step {step}: lower --lr-matrix or --lr-embed")
        if step == CALIBRATION[0]:
            calibrated_s = now_s
        if step == CALIBRATION[1] and steps is None:
            step_s = (now_s - calibrated_s) / (CALIBRATION[1] - CALIBRATION[0])
            steps = step + max(1, int(0.97 * (deadline_s - now_s) / step_s))  # 3% for evaluations on the way
            say(f"{step_s * 1e3:.1f} ms a step, {a.batch_tokens / step_s / 1e6:.2f} M tokens/s: {steps} steps fit")
        if now_s >= next_say_s or step == steps:
            next_say_s = now_s + a.say_every_s
            speed = step * a.batch_tokens / (now_s - train_start_s) / 1e6
            bits = f"~{loss_nats / math.log(2) / bytes_a_token:.3f} bits/byte"
            say(f"step {step}/{steps} loss {loss_nats:.4f} ({bits}) lr x{factor:.2f} mean {speed:.2f} M tokens/s")
        if now_s >= next_save_s or step == steps:
            total, count = nats(model, val_ids, a.context, a.context, max_windows=64)
            curve.append({"step": step, "train_nats_per_token": loss_nats, "val_part_nats_per_token": total / count})
            save_weights(a.out, model, a.max_shard_mib)
            say(f"step {step}: part of validation {total / count:.4f} nats/token; checkpoint saved")
            next_save_s = time.perf_counter() + a.save_every_s
        if now_s > deadline_s:
            say(f"time is up at step {step} of {steps}")
            break
    save_weights(a.out, model, a.max_shard_mib)
    seconds = time.perf_counter() - train_start_s
    return {"steps": step, "steps_planned": steps, "train_seconds": seconds, "curve": curve}


def train(a: argparse.Namespace) -> None:
    """All stages, in order; writes the folder `a.out`."""
    torch.manual_seed(a.seed)
    device = torch.device(a.device)
    documents, val = read_documents(a.train, a.limit_documents), read_documents(a.val, a.limit_documents)
    say(f"{len(documents)} training and {len(val)} validation documents")
    tokenizer = Tokenizer.from_file(str(a.tokenizer)) if a.tokenizer else train_tokenizer(documents, a.vocab)
    if tokenizer.get_vocab_size() != a.vocab or tokenizer.token_to_id(EOS) != EOS_ID:
        raise ValueError(f"tokenizer has {tokenizer.get_vocab_size()} entries, wanted --vocab {a.vocab}: drop --tokenizer")
    ids, val_ids = tokenise(tokenizer, documents), tokenise(tokenizer, val)
    stream = np.concatenate(ids)
    bytes_a_token = sum(len(text.encode()) for text in documents) / len(stream)
    say(f"{len(stream) / 1e6:.2f} M training tokens, {bytes_a_token:.3f} bytes a token")
    config = model_config(a)
    save_settings(a.out, config, tokenizer)
    model = Llama(config, torch.bfloat16 if device.type == "cuda" else torch.float32)
    model.initialise(torch.Generator().manual_seed(a.seed))
    model = model.to(device)
    parameters = sum(p.numel() for p in model.parameters())
    say(f"{parameters / 1e6:.3f} M parameters, of them {a.vocab * a.hidden / 1e6:.3f} M in the tied embedding")
    windows = Windows(stream, a.batch_tokens // a.context, a.context, a.seed, device)
    result = fit(a, model, windows, val_ids, bytes_a_token)
    tokens = result["steps"] * a.batch_tokens
    quality = evaluate(a.out, config, val, device)
    train_bytes = {"train_tokens_unique": len(stream), "train_bytes_a_token": bytes_a_token}
    seen = {"tokens_seen": tokens, "epochs": tokens / len(stream), **train_bytes}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu"
    versions = {m.__name__: m.__version__ for m in (torch, tokenizers, safetensors, np)} | {"python": platform.python_version()}
    where = {"device": name, "versions": versions, "command": " ".join(["python", *sys.argv]), "seed": a.seed}
    wall_s = time.perf_counter() - START_S
    write_json(a.out / "metrics.json", {**quality, "parameters": parameters, "wall_seconds": wall_s, **seen, **result, **where})
    say(json.dumps({**quality, **seen, "parameters": parameters}))
    for prompt in ("It was a dark and stormy night", "# Title: "):
        say(repr(sample(model, tokenizer, prompt, a.sample_tokens)))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--train", type=Path, default=Path(".data/train.jsonl.xz"))
    add("--val", type=Path, default=Path(".data/val.jsonl.xz"))
    add("--out", type=Path, default=Path("bookworm"))
    add("--join", type=Path, metavar="DIR", help="only merge the weight shards in DIR into one model.safetensors")
    add("--smoke", action="store_true", help="test every stage with a tiny model and a few steps")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--time-budget-s", type=float, default=570.0, help="wall-clock time for all stages together, in seconds")
    add("--steps", type=int, help="train exactly this many steps, to repeat a run on a faster or slower machine")
    add("--seed", type=int, default=1)
    add("--tokenizer", type=Path, help="tokenizer.json of an earlier run; default: train a new one")
    add("--max-shard-mib", type=float, help="split the weights into files of at most this many MiB; default: one file")
    add("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    sizes = {"vocab": 4096, "context": 2048, "hidden": 384, "ffn": 896, "layers": 4, "heads": 6, "kv_heads": 2}
    sizes |= {"head_dim": 64, "batch_tokens": 131072, "warmup": 200, "sample_tokens": 100, "limit_documents": None}
    for name, value in sizes.items():
        add("--" + name.replace("_", "-"), type=int, default=value)
    rates = {"lr_matrix": 0.02, "lr_embed": 0.003, "weight_decay": 0.1, "decay": 0.6}
    rates |= {"say_every_s": 5.0, "save_every_s": 60.0}
    for name, value in rates.items():
        add("--" + name.replace("_", "-"), type=float, default=value)
    a = parser.parse_args()
    if a.smoke:
        tiny = {"vocab": 512, "context": 128, "hidden": 64, "ffn": 96, "layers": 2}
        tiny |= {"heads": 4, "kv_heads": 2, "head_dim": 16}
        tiny |= {"batch_tokens": 1024, "steps": a.steps or 80, "warmup": 10, "limit_documents": 3, "sample_tokens": 20}
        a = argparse.Namespace(**{**vars(a), **tiny, "say_every_s": 1.0})
    return a


if __name__ == "__main__":
    options = arguments()
    if options.join:
        join(options.join)
    else:
        train(options)
