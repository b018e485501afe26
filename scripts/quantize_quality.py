"""Measure how much quantisation degrades a language model: bits per byte of books for each format and the float weights.

    python scripts/quantize_quality.py --books val.jsonl.xz --every 4 --out benchmarks/results/cpu/quantize-quality.json

Bits per byte are counted as in `train_bookworm.py`. Each book, followed by one end-of-text token, is cut into windows of the
model's context that do not overlap; each window begins with <|bos|>. Bits per byte are the nats of all tokens / ln 2 / UTF-8
bytes. With `--every N` only one window in N is read, and only the bytes of its tokens count. `--calibrate` gives some windows
of other books to `tw.quantize`.
"""

import argparse
import json
import lzma
import math
import platform
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

import tilewright as tw
from tilewright.models import Model, load_model, prompt_inputs, resolve
from tilewright.ops.weights import WEIGHT_FORMATS

Window = tuple[list[int], int]
"""Token ids to predict, and their UTF-8 bytes."""


def books(path: Path, most: int | None = None) -> Iterator[str]:
    """The documents of a .jsonl.xz file, with LF line ends."""
    with lzma.open(path, "rt", encoding="utf-8", newline="\n") as lines:
        for i, line in enumerate(lines):
            if i == most:
                return
            yield json.loads(line)["text"].replace("\r\n", "\n")


def windows(model: str, path: Path, eos: int, length: int, every: int, most_books: int | None = None) -> list[Window]:
    """Every `every`-th window of the books."""
    tokenizer = Tokenizer.from_file(str(resolve(model) / "tokenizer.json"))
    found: list[Window] = []
    for text in books(path, most_books):
        encoding = tokenizer.encode(text, add_special_tokens=False)
        ids, ends = [*encoding.ids, eos], [end for _, end in encoding.offsets]
        for first in range(0, len(ids), length):
            last = min(first + length, len(ends))
            piece = text[ends[first - 1] if first else 0 : ends[last - 1] if last else 0]
            found.append((ids[first : first + length], len(piece.encode())))
    return found[::every]


@torch.inference_mode()
def bits_per_byte(model: Model, some: list[Window], bos: int) -> float:
    """Over the windows, each alone."""
    nats, count = 0.0, 0
    for ids, size in some:
        logits = model.logits(model(*prompt_inputs(model, [bos, *ids[:-1]])))
        targets = torch.tensor(ids, device=logits.device)
        nats += F.cross_entropy(logits.float(), targets, reduction="sum").item()
        count += size
    return nats / math.log(2) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bookworm")
    parser.add_argument("--books", type=Path, required=True)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--formats", nargs="+", default=list(WEIGHT_FORMATS))
    parser.add_argument("--calibrate", type=Path, help="file of books for calibration")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    dtype = getattr(torch, a.dtype)

    def loaded() -> Model:
        return load_model(a.model, device=a.device, dtype=dtype)

    model = loaded()
    config = model.config
    bos, length = config.bos_token_id or 0, config.max_position_embeddings
    eos = config.eos_token_ids[0]
    some = windows(a.model, a.books, eos, length, a.every)
    calibration = windows(a.model, a.calibrate, eos, length, 1, most_books=16)[::48] if a.calibrate else None
    exact = bits_per_byte(model, some, bos)
    print(f"{len(some)} windows; float: {exact:.4f} bits per byte", flush=True)
    rows = []
    for format in a.formats:
        model = loaded()
        prompts = None if calibration is None else [prompt_inputs(model, ids) for ids, _ in calibration]
        report = tw.quantize(model, format, calibration=prompts)
        bits = bits_per_byte(model, some, bos)
        worst = max(report.quantized, key=lambda layer: layer.error or 0.0)
        rows.append(
            {
                "format": format,
                "bits_per_byte": round(bits, 5),
                "worse_by_percent": round(100 * (bits / exact - 1), 3),
                "layer_bytes": sum(layer.bytes_after for layer in report.quantized),
                "layer_bytes_before": sum(layer.bytes_before for layer in report.quantized),
                "worst_layer": worst.name,
                "worst_layer_error": round(worst.error or 0.0, 5),
            }
        )
        print(rows[-1], flush=True)
        if a.out:
            facts = {
                "what": f"bits per byte of {a.books.name}, one window of {length} tokens in {a.every}, {len(some)} in all",
                "command": "python scripts/quantize_quality.py " + " ".join(_words(a)),
                "model": a.model, "device": a.device, "dtype": a.dtype, "torch": torch.__version__,
                "machine": platform.processor() or platform.machine(), "calibrated": calibration is not None,
                "bits_per_byte_float": round(exact, 5), "rows": rows,
            }  # fmt: skip
            a.out.parent.mkdir(parents=True, exist_ok=True)
            a.out.write_text(json.dumps(facts, indent=1) + "\n")


def _words(a: argparse.Namespace) -> Iterator[str]:
    """The command line without folders of this machine."""
    for name, value in vars(a).items():
        if value is not None and name != "out":
            words = value if isinstance(value, list) else [value.name if isinstance(value, Path) else str(value)]
            yield f"--{name} {' '.join(words)}"


if __name__ == "__main__":
    main()
