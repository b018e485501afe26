"""Text in and out: what comes piece by piece is what comes at once, and model folders that are not whole say so."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from tests.engine.fake_runner import byte_tokenizer
from tests.paths import SHARED
from tilewright.engine.chat import ChatTemplateError
from tilewright.engine.tokenizer import Detokenizer, Tokenizer, TokenizerError

STORIES = SHARED / "models" / "stories260K"
TEXT = "Der Fuß, наука, 東京の塔, 🙂🙃 emoji 👩‍🚀, na\u0301ive \u00a0 tabs\t\n\nand new lines, don't! " * 3


@lru_cache
def trained() -> Tokenizer:
    """Byte-level BPE with merges, some of which cut characters."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, special_tokens=["<end>"], show_progress=False)
    backend.train_from_iterator([TEXT], trainer)
    return Tokenizer(backend, special_tokens={"eos_token": "<end>"})


@lru_cache
def sentencepiece_like() -> Tokenizer:
    """As Llama 2's: a leading mark for spaces, a stripped first space, byte fallback."""
    words = ["▁", "▁a", "a", "b", "▁be", "ed", "é", "▁東", ",", "\n\n", "▁▁"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *bytes_, *words])}
    model = models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    backend = tokenizers.Tokenizer(model)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(backend, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})


@lru_cache
def metaspace() -> Tokenizer:
    """SentencePiece's decoder in its other spelling."""
    vocab = [("<unk>", 0.0), ("▁", -1.0), ("▁a", -1.0), ("a", -1.0), ("▁be", -1.0), ("ed", -1.0), ("東", -1.0)]
    backend = tokenizers.Tokenizer(models.Unigram(vocab=vocab, unk_id=0))
    backend.decoder = decoders.Metaspace()
    return Tokenizer(backend)


@lru_cache
def wordpiece() -> Tokenizer:
    """A decoder whose tokens are not looked at one by one: each is decoded with the one before it."""
    words = ["[UNK]", "a", "##a", "be", "##ed", ".", "n't", "東", "##東"]
    backend = tokenizers.Tokenizer(models.WordPiece(vocab={word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    return Tokenizer(backend)


TOKENIZERS = {
    "bytes": byte_tokenizer,
    "trained": trained,
    "sentencepiece_like": sentencepiece_like,
    "metaspace": metaspace,
    "wordpiece": wordpiece,
}


def whole(tokenizer: Tokenizer, prompt: list[int], generated: list[int]) -> str:
    """The definition: what the generated tokens add to the prompt when everything is decoded at once."""
    before, after = tokenizer.decode(prompt), tokenizer.decode(prompt + generated)
    same = 0
    while same < min(len(before), len(after)) and before[same] == after[same]:
        same += 1
    return after[same:] if generated else ""


def pieces(tokenizer: Tokenizer, prompt: list[int], generated: list[int], sizes: list[int]) -> list[str]:
    """What `push` and at last `flush` give; between them `peek` must complete the text of the tokens so far."""
    detokenizer = Detokenizer(tokenizer, prompt)
    found, at, turn = [], 0, 0
    while at < len(generated):
        size = sizes[turn % len(sizes)]
        found.append(detokenizer.push(generated[at : at + size]))
        at, turn = at + size, turn + 1
        if turn < 40 and tokenizer.visible(generated[:at]):
            assert "".join(found) + detokenizer.peek() == whole(tokenizer, prompt, generated[:at])
    found.append(detokenizer.flush())
    assert detokenizer.flush() == ""
    return found


def ids(tokenizer: Tokenizer, most: int = 30):
    """Random ids, some of no token, and the ids of text, whose characters random ids would seldom make whole."""
    text = st.text(st.sampled_from(sorted(set(TEXT))), max_size=most).map(lambda t: tokenizer.encode(t, add_special=False))
    fallback = st.text(st.sampled_from("é東🙂a\n"), max_size=8).map(lambda t: [b + 3 for b in t.encode()])
    noise = st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=most)
    return st.lists(st.one_of(text, noise, fallback), max_size=4).map(lambda parts: [i for part in parts for i in part])


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_pieces_are_the_whole(name, data):
    tokenizer = TOKENIZERS[name]()
    prompt, generated = data.draw(ids(tokenizer, 12)), data.draw(ids(tokenizer))
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    found = pieces(tokenizer, prompt, generated, sizes)
    if tokenizer.visible(generated):
        assert "".join(found) == whole(tokenizer, prompt, generated)
    else:
        assert "".join(found) == ""


@pytest.mark.parametrize("name", ["bytes", "trained"])
@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=20))
def test_no_piece_has_half_a_character(name, text):
    tokenizer = TOKENIZERS[name]()
    generated = tokenizer.encode(text)
    found = pieces(tokenizer, [], generated, [1])
    assert "".join(found) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in found)


def test_which_tokens_have_one_text_everywhere():
    assert trained().suffix(trained().encode("a")[0]) == "a"
    assert not {i for i in byte_tokenizer().encode("é") if byte_tokenizer().suffix(i) is not None}
    assert sentencepiece_like().suffix(3 + 0x0A) is None
    assert sentencepiece_like().suffix(260) == " a"
    assert wordpiece().suffix(1) is None


def test_byte_runs_wait_for_their_end():
    tokenizer = sentencepiece_like()
    byte = {b: b + 3 for b in range(256)}
    a = tokenizer.encode("a", add_special=False)[0]
    detokenizer = Detokenizer(tokenizer, [1])
    assert [detokenizer.push([i]) for i in (a, byte[0xC3], byte[0xA9])] == ["a", "", ""]
    assert detokenizer.open
    assert detokenizer.peek() == "é"
    assert detokenizer.push([a]) == "éa"
    assert [detokenizer.push([i]) for i in (byte[0xC3], byte[0xA9], byte[0xFF])] == ["", "", ""]
    assert detokenizer.flush() == "\ufffd\ufffd\ufffd"


def test_the_prompt_is_context_and_not_repeated():
    tokenizer = sentencepiece_like()
    word = tokenizer._backend.token_to_id("▁a")
    assert word is not None
    newline = 3 + 0x0A
    assert Detokenizer(tokenizer, []).push([word]) == "a"
    assert Detokenizer(tokenizer, [1]).push([word]) == "a"
    assert Detokenizer(tokenizer, [1, word]).push([word]) == " a"
    assert Detokenizer(tokenizer, [1, word, newline]).push([word]) == " a"
    assert Detokenizer(byte_tokenizer(), list("ö".encode()[:1])).push(list("ö!".encode()[1:])) == "ö!"


def test_special_and_unknown_tokens_have_no_text():
    tokenizer = byte_tokenizer()
    assert tokenizer.vocab_size == 257
    assert tokenizer.eos_ids == (256,)
    assert tokenizer.decode([104, 256, 105, 257, 100_000, -1]) == "hi"
    detokenizer = Detokenizer(tokenizer, [])
    assert [detokenizer.push([token]) for token in (256, 104, 300, 105)] == ["", "h", "", "i"]


def test_names_of_tokens():
    tokenizer = sentencepiece_like()
    names = [tokenizer.id_to_token(token) for token in range(tokenizer.vocab_size)]
    assert {"▁a", "<0x0A>"} <= set(names)
    assert [tokenizer.token_to_id(name) for name in names] == list(range(tokenizer.vocab_size))
    assert [tokenizer.id_to_token(token) for token in (-1, tokenizer.vocab_size, 1 << 40)] == [None] * 3
    assert tokenizer.token_to_id("no such name") is None


def test_long_streams_cost_the_same_per_token():
    """The window stays short: 20 000 tokens would take minutes if each decoded all before it."""
    tokenizer = trained()
    generated = tokenizer.encode(TEXT * 100)
    found = pieces(tokenizer, [], generated, [1])
    assert "".join(found) == TEXT * 100


# Model folders -------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sentencepiece_like()._backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": {"content": "</s>"}}')
    return tmp_path


def test_folder(folder):
    tokenizer = Tokenizer.load(folder)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (1, (2,), 270)
    (folder / "config.json").write_text('{"eos_token_id": 7}')
    assert Tokenizer.load(folder).eos_ids == (2, 7)
    (folder / "generation_config.json").write_text('{"eos_token_id": [8, 9]}')
    assert Tokenizer.load(folder).eos_ids == (2, 8, 9)


def test_truncation_in_the_file_is_ignored(folder):
    path = folder / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(path))
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    backend.save(str(path))
    assert len(Tokenizer.load(folder).encode("aaaaa")) == 5


BROKEN = [
    ("tokenizer.json", None, "has no tokenizer.json"),
    ("tokenizer.json", "{", "is not a tokenizer"),
    ("tokenizer.json", '{"model": {"type": "Nope"}}', "is not a tokenizer"),
    ("tokenizer.json", b"\xff\xfe", "is not UTF-8"),
    ("tokenizer_config.json", "{]", "is not JSON"),
    ("tokenizer_config.json", "[]", "must contain a JSON object, got list"),
    ("tokenizer_config.json", '{"eos_token": "<nope>"}', "not in the vocabulary"),
    ("tokenizer_config.json", '{"eos_token": 3}', "wanted a string or an object"),
    ("tokenizer_config.json", '{"chat_template": 3}', "wanted a string"),
    ("tokenizer_config.json", '{"chat_template": "{% if %}"}', "chat template is not valid"),
    ("generation_config.json", "?", "is not JSON"),
]


@pytest.mark.parametrize(("name", "content", "words"), BROKEN, ids=[f"{n}-{w}" for n, _, w in BROKEN])
def test_broken_folder(folder, name, content, words):
    path = folder / name
    if content is None:
        path.unlink()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content)
    with pytest.raises(TokenizerError, match=words) as error:
        Tokenizer.load(folder)
    assert str(folder) in str(error.value)


def test_missing_folder(tmp_path):
    with pytest.raises(TokenizerError, match="is not a folder"):
        Tokenizer.load(tmp_path / "nowhere")


# Chat ----------------------------------------------------------------------------------------------------------------

TEMPLATE = """
{%- for message in messages %}
    {%- if message.role == 'tool' %}{{ raise_exception('no tools, got ' ~ message.role) }}{% endif %}
    {%- if loop.index > 3 %}{% break %}{% endif %}
{{ bos_token }}{{ message.role }}: {{ message.content | trim }}
{% endfor %}
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- if add_generation_prompt %}assistant:{% endif %}
""".strip()

USER = [{"role": "user", "content": " 1 < 2 "}]


def with_template(template: str | None) -> Tokenizer:
    base = sentencepiece_like()
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(base._backend, special_tokens=special, chat_template=template)


def test_chat_template():
    tokenizer = with_template(TEMPLATE)
    assert tokenizer.apply_chat_template(USER) == "<s>user: 1 < 2\nassistant:"
    assert tokenizer.apply_chat_template(USER, add_generation_prompt=False) == "<s>user: 1 < 2\n"
    assert tokenizer.apply_chat_template(USER, tools=[{"é": "<"}]) == '<s>user: 1 < 2\n[{"é": "<"}]assistant:'


ATTACKS = [
    "{{ messages.__class__.__mro__ }}",
    "{{ ''.__class__.__base__.__subclasses__() }}",
    "{{ raise_exception.__globals__ }}",
    "{{ self._TemplateReference__context.environment.globals }}{{ cycler.__init__.__globals__.os.system('true') }}",
    "{% set _ = messages.append(1) %}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{{ '%s' | format(strftime_now.__globals__) }}",
]


@pytest.mark.parametrize("template", ATTACKS)
def test_the_sandbox_holds(template):
    messages = [dict(message) for message in USER]
    try:
        text = with_template(template).apply_chat_template(messages)
    except ChatTemplateError:
        text = ""
    assert "object" not in text
    assert "root:" not in text
    assert "builtins" not in text
    assert messages == USER


REFUSES = [
    (None, USER, "no chat template"),
    (TEMPLATE, [{"role": "tool", "content": ""}], "refuses these messages: no tools, got tool"),
    ("{{ messages[0].content + 1 }}", USER, "fails on these messages: TypeError"),
    ("{% for i in range(90000) %}{{ 'x' * 1000 }}{% endfor %}", USER, "makes more than"),
    ("x" * (1 << 20) + "x", USER, "wanted at most"),
]


@pytest.mark.parametrize(("template", "messages", "words"), REFUSES, ids=[words for _, _, words in REFUSES])
def test_chat_refusals(template, messages, words):
    with pytest.raises(ChatTemplateError, match=words):
        with_template(template).apply_chat_template(messages)


@pytest.mark.parametrize("where", ["string", "list", "file"])
def test_where_templates_are_found(folder, where):
    config: dict[str, Any] = {"bos_token": "<s>"}
    if where == "string":
        config["chat_template"] = TEMPLATE
    elif where == "list":
        config["chat_template"] = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": TEMPLATE}]
    else:
        config["chat_template"] = "the file goes first"
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.load(folder).apply_chat_template(USER).startswith("<s>user: 1 < 2")


# A real model's tokenizer --------------------------------------------------------------------------------------------


@lru_cache
def stories() -> Tokenizer:
    return Tokenizer.load(STORIES)


needs_stories = pytest.mark.skipif(not STORIES.is_dir(), reason=f"{STORIES} is not there")


@needs_stories
def test_stories_text_comes_out_exactly():
    tokenizer = stories()
    said = json.loads((STORIES / "expected.json").read_text())
    generated, prompt, text = said["greedy_token_ids"], said["prompt_token_ids"], said["text"]
    assert (len(generated), len(text), prompt) == (200, 464, [1])
    for sizes in ([1], [2, 3], [200]):
        assert "".join(pieces(tokenizer, prompt, generated, sizes)) == text
    assert tokenizer.decode(prompt + generated) == text
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (1, (2,), 512)


@needs_stories
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_stories_pieces_are_the_whole(data):
    tokenizer = stories()
    prompt, generated = data.draw(ids(tokenizer, 12)), data.draw(ids(tokenizer))
    found = pieces(tokenizer, prompt, generated, [1, 2])
    assert "".join(found) == (whole(tokenizer, prompt, generated) if tokenizer.visible(generated) else "")
