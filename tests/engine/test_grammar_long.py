"""Grammars in numbers: MaskBench's schemas and their instances, masks against single tokens, thousands of hostile grammars.

MaskBench is the folder `maskbench/data` of the repository guidance-ai/jsonschemabench. It is looked for where the environment
variable TILEWRIGHT_MASKBENCH says. A schema passes if it compiles, takes its valid instances and refuses the others; about as
many are to pass as with the library's own defaults. TILEWRIGHT_HOSTILE is the number of hostile grammars.
"""

import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilewright.engine.grammar import Grammar
from tilewright.engine.grammar_masks import GrammarError, Grammars
from tilewright.engine.grammar_trial import GrammarTrial
from tilewright.engine.tokenizer import Tokenizer

pytestmark = pytest.mark.long
llguidance = pytest.importorskip("llguidance", reason="pip install 'tilewright[structured]'")
BOOKWORM = Path(__file__).parents[2] / "tilewright" / "assets" / "bookworm"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(BOOKWORM)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer.to_json(), tokenizer.eos_ids, kept=0)


def schemas() -> Iterator[dict]:
    """The cases of MaskBench: {schema, tests: [{valid, data}]}. Skips without the folder."""
    folder = os.environ.get("TILEWRIGHT_MASKBENCH")
    if folder is None:
        pytest.skip("TILEWRIGHT_MASKBENCH is not set: MaskBench's maskbench/data is not there")
    paths = sorted(Path(folder).glob("*.json"))
    assert len(paths) > 1000, f"{folder} has {len(paths)} schemas"
    for path in paths:
        case = json.loads(path.read_text())
        if "schema" in case and case.get("tests"):
            yield case


def kind_of(first: Any, tests: list[dict], tokenizer: Tokenizer) -> str:
    """What a schema's matcher does with its instances."""
    wrong = set()
    for test in tests:
        matcher = first.deep_copy()
        tokens = tokenizer.encode(json.dumps(test["data"], ensure_ascii=False), add_special=False)
        taken = matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()
        if taken != test["valid"]:
            wrong.add("accepted wrongly" if taken else "refused wrongly")
    return min(wrong, default="passed")


@pytest.mark.timeout(1800)
def test_maskbench(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """Ours, beside the library with its own bounds and its own white space."""
    plain = llguidance.LLTokenizer(tokenizer.to_json(), eos_token=list(tokenizer.eos_ids))
    ours, library = Counter[str](), Counter[str]()
    for case in schemas():
        try:
            found = kind_of(grammars.compiled(Grammar.json_schema(case["schema"])), case["tests"], tokenizer)
        except ValueError:
            found = "refused"
        ours[found] += 1
        try:
            source = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(case["schema"]))
            matcher = llguidance.LLMatcher(plain, source, log_level=0)
            found = "refused" if matcher.is_error() else kind_of(matcher, case["tests"], tokenizer)
        except ValueError:
            found = "refused"
        library[found] += 1
    print(f"{ours.total()} schemas: {dict(ours)}; the library by itself: {dict(library)}")
    assert ours["accepted wrongly"] == 0
    assert ours["passed"] >= 0.999 * library["passed"]
    assert ours["passed"] / ours.total() > 0.85


@pytest.mark.timeout(1800)
def test_masks_of_500_schemas_are_what_each_token_alone_would_say(grammars: Grammars, tokenizer: Tokenizer) -> None:
    rng, checked = random.Random(0), 0
    cases = list(schemas())
    rng.shuffle(cases)
    for case in cases:
        valid = [test["data"] for test in case["tests"] if test["valid"]]
        try:
            matcher = grammars.compiled(Grammar.json_schema(case["schema"]))
        except ValueError:
            continue
        if not valid:
            continue
        tokens = tokenizer.encode(json.dumps(valid[0], ensure_ascii=False), add_special=False)
        stop = rng.randint(0, min(len(tokens), 60))
        if matcher.validate_tokens(tokens[:stop]) != stop or not matcher.consume_tokens(tokens[:stop]):
            continue
        flags = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little").astype(bool)
        alone = np.array([matcher.validate_tokens([token]) == 1 for token in range(tokenizer.vocab_size)])
        alone[list(tokenizer.eos_ids)] = matcher.is_accepting()
        forced = matcher.compute_ff_tokens()
        if forced:
            assert alone[forced[0]]
            alone[:] = False
            alone[forced[0]] = True
        assert not matcher.is_error()
        assert (flags[: len(alone)] == alone).all(), case["schema"]
        checked += 1
        if checked == 500:
            return
    raise AssertionError(f"{checked} schemas, wanted 500")


def hostile(rng: random.Random) -> Grammar:
    """A grammar that wants too much, is damaged, or is merely odd."""
    n = rng.choice([3, 50, 1000, 20_000])
    atom = rng.choice(["a", "[a-z]", ".", r"\w", "(a|b|ab)", r"\p{L}", "é", "(x*)*", "(a|aa)+"])
    kinds = (
        lambda: Grammar.regex(f"({atom}{{{n}}}){{{n}}}"),
        lambda: Grammar.regex(f"{atom}*a{atom}{{{n}}}"),
        lambda: Grammar.regex("(" * n + "a" + ")" * rng.choice([n, n - 1])),
        lambda: Grammar.regex("|".join(f"{atom}{i}.*{i}" for i in range(min(n, 3000)))),
        lambda: Grammar.regex(rng.choice([r"(a)\1", "(?=a)b", "[", "a{5,2}", "\\", "(?P<x>", "(?i)" * n, "\\x{110000}"])),
        lambda: Grammar.lark("start: " + "a " * n + "\na: " + rng.choice(["a a", '"x"*', "start", "/[/", '"']) + "\n"),
        lambda: Grammar.lark("\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(min(n, 2000))) + '\nstart: r0\nr9: "a"'),
        lambda: Grammar.lark("start: " + "(" * n + '"a"' + ")" * n),
        lambda: Grammar.lark("".join(rng.choice(list('start:|()"/\\[]*+?{}\n a%json')) for _ in range(min(n, 400)))),
        lambda: Grammar.json_schema({"$ref": "#", "x": n}),
        lambda: Grammar.json_schema({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
        lambda: Grammar.json_schema(
            {"allOf": [{"$ref": "#/$defs/a"}] * min(n, 500), "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 9}}}
        ),
        lambda: Grammar.json_schema({"type": "string", "pattern": f"^({atom}+)+$", "minLength": n, "maxLength": n * n}),
        lambda: Grammar.json_schema(
            {"type": "array", "minItems": n, "items": {"anyOf": [{"const": i} for i in range(min(n, 2000))]}}
        ),
        lambda: Grammar.json_schema(
            {"properties": {f"k{i}": {"type": "object", "properties": {"x": {"$ref": "#"}}} for i in range(min(n, 500))}}
        ),
        lambda: Grammar.json_schema(
            {"type": "number", "multipleOf": 10.0 ** -rng.randint(0, 300), "minimum": -(10 ** rng.randint(0, 300))}
        ),
        lambda: Grammar.json_schema(
            {"oneOf": [{"required": [f"k{i}"]} for i in range(min(n, 300))], "type": rng.choice(["object", 3])}
        ),
        lambda: Grammar.json_schema('{"not":' * min(n, 900) + "{}" + "}" * min(n, 900)),
    )
    return rng.choice(kinds)()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", [int(os.environ.get("TILEWRIGHT_HOSTILE", "10000"))])
def test_hostile_grammars_are_refused_or_served(tokenizer: Tokenizer, grammars: Grammars, count: int) -> None:
    """In the child first; what it lets through is compiled here and followed for 20 tokens. None kills."""
    trial = GrammarTrial(tokenizer.to_json(), tokenizer.eos_ids)
    rng, counts, slowest, longest = random.Random(7), Counter[str](), 0.0, 0.0
    for _ in range(count):
        start_s = time.perf_counter()
        try:
            grammar = hostile(rng)
            trial.check(grammar)
            matcher = grammars.compiled(grammar).deep_copy()
        except GrammarError:
            counts["refused"] += 1
        except ValueError:
            counts["refused at once"] += 1
        else:
            counts["compiled"] += 1
            for _ in range(20):
                mask_s = time.process_time()
                flags = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
                longest = max(longest, time.process_time() - mask_s)
                if matcher.is_error() or matcher.is_stopped():
                    break
                token = int(rng.choice(np.flatnonzero(flags)))
                if token in tokenizer.eos_ids or not matcher.consume_token(token):
                    break
            counts["failed later"] += matcher.is_error()
        slowest = max(slowest, time.perf_counter() - start_s)
    trial.close()
    print(dict(counts), f"slowest {slowest:.2f} s, longest mask {longest * 1e3:.0f} ms")
    assert sum(counts[kind] for kind in ("refused", "refused at once", "compiled")) == count
    assert longest < 2.0
