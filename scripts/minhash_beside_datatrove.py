"""Compare MinHash signatures by this package and by datatrove: `scripts/minhash_beside_datatrove.py BOOKS.jsonl`.

Both compute 14 x 8 hash values from shingles of five words, in turns, in one process each. CPU seconds are counted, so that
other load on the machine matters little. datatrove runs twice: unchanged, with spaCy's words, and with its word tokenizer
replaced by a split at spaces. Its hash, xxHash, is given bytes, because newer releases of xxhash do not accept text.
"""

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import xxhash
from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupSignature

from tilewright.data.compressed import Limits
from tilewright.data.minhash import parameters, shingles, signatures
from tilewright.data.read import documents, format_of

PIECE = 50_000  # characters of a document


class Split:
    """A word tokenizer for datatrove that costs nothing."""

    def word_tokenize(self, text: str) -> list[str]:
        """Words between spaces."""
        return text.split()


def main() -> None:
    """Measure and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("books", type=Path)
    parser.add_argument("--mb", type=float, default=4.0, help="amount of text in MB")
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    texts: list[str] = []
    for document in documents(given.books, format_of(given.books), Limits(), Counter()):
        texts += [document.text[at : at + PIECE] for at in range(0, len(document.text), PIECE)]
        if sum(map(len, texts)) >= given.mb * 1e6:
            break
    size = sum(len(text.encode()) for text in texts) / 1e6
    a, b = parameters(112)
    stock = MinhashDedupSignature("/tmp/minhash-unused", MinhashConfig())
    split = MinhashDedupSignature("/tmp/minhash-unused", MinhashConfig())
    split.word_tokenizer = Split()  # pyright: ignore[reportAttributeAccessIssue]
    for step in (stock, split):
        step._hash_func = lambda text: xxhash.xxh64_intdigest(text.encode())
    ways: dict[str, Callable[[], object]] = {
        "ours": lambda: signatures([shingles(text) for text in texts], a, b),
        "datatrove": lambda: [stock.get_signature(stock.get_shingles(text)) for text in texts],
        "datatrove, words split at spaces": lambda: [split.get_signature(split.get_shingles(text)) for text in texts],
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    stock.get_shingles(texts[0])  # spaCy is loaded
    for _ in range(given.turns):
        for name, call in ways.items():
            begun = time.process_time()
            call()
            seconds[name].append(time.process_time() - begun)
    speed = {name: round(size / statistics.median(found), 2) for name, found in seconds.items()}
    times = {f"times {name}": round(speed["ours"] / speed[name], 1) for name in list(ways)[1:]}
    print(json.dumps({"MB": round(size, 2), "turns": given.turns, "MB/s a core": speed, **times}))


if __name__ == "__main__":
    main()
