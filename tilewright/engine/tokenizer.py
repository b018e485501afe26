"""Text <-> token ids, and text from tokens as they arrive.

tokenizer_files.py reads the tokenizer of a model folder. Not supported: `clean_up_tokenization_spaces`, which would make the
text of a token depend on later tokens.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tilewright.engine.chat import ChatTemplate, ChatTemplateError
from tilewright.engine.cut import Cut, starts
from tilewright.extras import MissingExtra, advice

try:
    import tokenizers
except ModuleNotFoundError:
    raise MissingExtra(advice("a language model", "tokenizers")) from None

__all__ = ["Cut", "Detokenizer", "Tokenizer", "TokenizerError"]

UNFINISHED = "\ufffd"
"""A decoder writes this for bytes that are not, or not yet, a character."""
SHORT_CHARS = 2048
"""Texts up to this length are encoded directly, in well under a millisecond. The call that frees other threads costs 50 us."""
_BARRED = re.compile(r"<[|\uff5c].*[|\uff5c]>", re.DOTALL)
PROMPT_WINDOW = 8
"""Generated text is decoded together with this many last tokens of the prompt. A character has at most 4 bytes, so 4 tokens."""


class TokenizerError(ValueError):
    """A tokenizer folder is missing, incomplete or corrupt."""


class Tokenizer:
    """A `tokenizers.Tokenizer` with the functions that the engine needs. `Tokenizer.load(folder)` loads that of a model.

    Args:
        backend: its truncation and padding are switched off.
        eos_ids: tokens that end a text.
        special_tokens: bos_token, eos_token ... -> their texts.
        chat_template: Jinja source.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_ids: Iterable[int] = (),
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
    ):
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = special = dict(special_tokens or {})
        self.bos_id: int | None = self._special_id(special, "bos_token")
        eos_id = self._special_id(special, "eos_token")
        self.eos_ids: tuple[int, ...] = tuple(sorted({*eos_ids, *(() if eos_id is None else (eos_id,))}))
        self.vocab_size: int = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        """Token ids are below this."""
        self._hidden = {token for token, added in backend.get_added_tokens_decoder().items() if added.special}
        self._bytes = _byte_tokens(backend)
        self._anchor = _anchor(backend, self.visible(range(min(1000, self.vocab_size))))
        self.suffixes: dict[int, str] = {}
        """Cached results of `suffix`; `Detokenizer` looks here first."""
        self._chat = None if chat_template is None else ChatTemplate(chat_template, special)
        added = {token.content: token.special for token in backend.get_added_tokens_decoder().values()}
        named = [text for text in added if text.strip() and (text in (chat_template or "") or _BARRED.fullmatch(text))]
        self._special_texts = starts(text for text, special in added.items() if special)
        self._control_texts = starts([*named, *(text for text, special in added.items() if special)])

    @classmethod
    def load(cls, folder: str | Path) -> "Tokenizer":
        """The tokenizer of a model folder. Raises TokenizerError, which names the file and its error."""
        # Imported here because it imports the models package and torch, which other users of this module do not need.
        from tilewright.engine.tokenizer_files import load

        return load(folder)

    def _special_id(self, special: Mapping[str, str], name: str) -> int | None:
        if name not in special:
            return None
        token = self._backend.token_to_id(special[name])
        if token is None:
            raise TokenizerError(f"the {name} {special[name]!r} of tokenizer_config.json is not in the vocabulary")
        return token

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids of a text; `add_special`: add the special tokens that the model's files specify, such as BOS.

        The name of a special token in the text becomes that token. Other threads can run while a long text is encoded.

        Raises:
            TokenizerError: the library fails on this text.
        """
        try:
            if len(text) <= SHORT_CHARS:
                return self._backend.encode(text, add_special_tokens=add_special).ids
            return self._backend.encode_batch_fast([text], add_special_tokens=add_special)[0].ids  # without Python's lock
        except BaseException as error:
            # An error inside the library, such as a regular expression that gives up, may be no subclass of `Exception`.
            if type(error).__name__ == "PanicException" or type(error) is Exception:
                raise TokenizerError(f"the tokenizer fails on this text: {str(error)[:200]}") from None
            raise

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """(token ids of two texts as one input, for each token the index of its text). Raises TokenizerError."""
        try:
            found = self._backend.encode(first, second)
        except BaseException as error:
            if type(error).__name__ == "PanicException" or type(error) is Exception:
                raise TokenizerError(f"the tokenizer fails on these texts: {str(error)[:200]}") from None
            raise
        return found.ids, found.type_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the tokens, without special and unknown ones. Bytes that are not valid UTF-8 become U+FFFD."""
        return self._backend.decode(self.visible(token_ids), skip_special_tokens=False)

    @property
    def chat_template(self) -> str | None:
        """The source of the chat template, or None."""
        return None if self._chat is None else self._chat.source

    def spelled(self, token_ids: Sequence[int]) -> str:
        """The text of the tokens, including the names of special tokens."""
        return self._backend.decode(list(token_ids), skip_special_tokens=False)

    def to_json(self) -> str:
        """The tokenizer as the text of a `tokenizer.json`."""
        return self._backend.to_str()

    def id_to_token(self, token_id: int) -> str | None:
        """The name of a token in the vocabulary, which is not its text ("\u0120the", "<0x0A>", "<s>"), or None."""
        return self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None

    def token_to_id(self, token: str) -> int | None:
        """The token with this name in the vocabulary, or None."""
        return self._backend.token_to_id(token)

    def visible(self, token_ids: Iterable[int]) -> list[int]:
        """The tokens that have a text: those in the vocabulary that are not special."""
        hidden, size = self._hidden, self.vocab_size
        return [token for token in token_ids if 0 <= token < size and token not in hidden]

    def suffix(self, token_id: int) -> str | None:
        """The text that a visible token adds after any complete text, if it is always the same.

        None for a token that is a byte or contains part of a character. Also None for every token if the decoder is not known
        to decode tokens independently.
        """
        if self._anchor is None or token_id in self._bytes:
            return None
        before, after = self._backend.decode([self._anchor]), self._backend.decode([self._anchor, token_id])
        text = after[len(before) :]
        if not after.startswith(before) or UNFINISHED in text:
            return None
        self.suffixes[token_id] = text
        return text

    def is_byte(self, token_id: int) -> bool:
        """True for a byte-fallback token such as <0x0A>. A decoder joins a run of such tokens to characters, all or none."""
        return token_id in self._bytes

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The text of a conversation, to be encoded with `add_special=False`. Raises ChatTemplateError.

        `variables`: add_generation_prompt (default True), tools, and other variables of the template.
        """
        if self._chat is None:
            raise ChatTemplateError("this model has no chat template (it is a base model); wanted a plain prompt instead")
        return self._chat(messages, **variables)

    def chat_ids(self, messages: Sequence[Mapping[str, Any]], *, allow_special: bool = False, **variables: Any) -> list[int]:
        """Token ids of a conversation, through the chat template. Raises ChatTemplateError or TokenizerError.

        The content of messages is treated as text. If it spells a control token, by which a turn could be forged, this spelling
        is encoded in pieces, none of which is that token. Control tokens are the special tokens, and those other added tokens
        that the template names or that are written like <|this|>. In assistant turns only the special tokens count, because
        templates look for the others there ("</think>"). With `allow_special`, spelled control tokens become these tokens. A
        control token of a single character cannot be split and always becomes that token.
        """
        if allow_special:
            return self.encode(self.apply_chat_template(messages, **variables), add_special=False)
        cut, safe = self.safe(messages, variables)
        pieces = self.apply_chat_template(safe, **cut.apart(variables, self._control_texts)).split(cut.mark)
        return [token for piece in pieces for token in self.encode(piece, add_special=False)]

    def safe(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> tuple[Cut, list[Any]]:
        """The messages with marks inside all texts that would spell control tokens."""
        cut = Cut(json.dumps([messages, variables], ensure_ascii=False, default=str))
        texts = {True: self._special_texts, False: self._control_texts}
        return cut, [cut.apart(one, texts[one.get("role") == "assistant"]) for one in messages]


class Detokenizer:
    """The text of generated tokens, as they arrive.

    The joined pieces equal the text that the tokens add to the prompt if all are decoded at once: with `p = decode(prompt)` and
    `f = decode(prompt + generated)`, they are `f` without the longest common prefix of `p` and `f`. A piece never ends within a
    character; bytes that may become one are held back. The decoders of byte-fallback tokenizers turn a run of byte tokens into
    text only if all of it is UTF-8, so a whole run is held back until it ends.

    With `special`, the text contains the names of special tokens where they were generated.

    Only a short window of tokens is decoded at a time; it begins where the text before is complete. Most tokens need no
    decoding at all (`Tokenizer.suffix`).
    """

    __slots__ = ("_complete", "_given", "_run", "_special", "_suffixes", "_tokenizer", "_window", "open")

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), *, special: bool = False):
        self._tokenizer = tokenizer
        self._suffixes = tokenizer.suffixes
        self._special = special
        self._window = _prompt_end(tokenizer, prompt_ids)
        self._given = tokenizer.decode(self._window)  # the window's text that needs no output: the prompt's, or returned before
        self._run = 0  # byte-fallback tokens at the window's end
        while self._run < len(self._window) and tokenizer.is_byte(self._window[-1 - self._run]):
            self._run += 1
        # There is text in the window, and no later token can change it.
        self._complete = bool(self._given) and not self._run and not self._given.endswith(UNFINISHED)
        self.open = False
        """True while the text of some tokens is held back."""

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens add, as far as it is complete."""
        text = ""
        for token in token_ids:
            text += self.push_one(token)
        return text

    def push_one(self, token: int) -> str:
        """`push` for one token."""
        if self._complete:
            known = self._suffixes.get(token)
            if known is not None:
                self._window = [token]
                return known
        return self._push(token)

    def _push(self, token: int) -> str:
        tokenizer, window = self._tokenizer, self._window
        if not tokenizer.visible((token,)):
            return self._push_special(token) if self._special else ""
        if self._complete:
            known = tokenizer.suffix(token)
            if known is not None:
                self._window = [token]
                return known
            self._given = tokenizer.decode(window)
            self._complete = False
        window.append(token)
        self._run = self._run + 1 if tokenizer.is_byte(token) else 0
        self.open = True
        text = tokenizer.decode(window[: len(window) - self._run] if self._run else window)
        # An unfinished character is a single UNFINISHED at the end; any before it are final.
        final = text[:-1] if text.endswith(UNFINISHED) else text
        new = self._beyond(final)
        if new:
            self._given = final
        if final is text and not self._run:
            self._window = window[-1:]
            self._complete, self.open = True, False
        return new

    def _push_special(self, token: int) -> str:
        """The name of a special token, after any text that was held back before it."""
        name = self._tokenizer.id_to_token(token) or ""
        text = self.peek() + name
        self._window, self._given, self._run = [token], "", 0
        self._complete, self.open = True, False
        return text

    def peek(self) -> str:
        """What `flush` would return."""
        return self._beyond(self._tokenizer.decode(self._window)) if self.open else ""

    def flush(self) -> str:
        """The text that is held back, if no more tokens come. Bytes that are not a character become U+FFFD."""
        text = self.peek()
        self._window, self._given, self._run, self._complete, self.open = [], "", 0, False, False
        return text

    def _beyond(self, text: str) -> str:
        given = self._given
        return text[len(given) :] if text.startswith(given) else text[_common(given, text) :]


def _anchor(backend: tokenizers.Tokenizer, token_ids: Iterable[int]) -> int | None:
    """A token with visible text, after which `suffix` decodes other tokens; None if the decoder is not known to allow this."""
    if backend.decoder is None:
        return None
    state = json.loads(backend.decoder.__getstate__())
    parts = state["decoders"] if state["type"] == "Sequence" else [state]
    # Each of these decodes a token independently of its neighbours, except for bytes, which are joined, and the first token.
    known = {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip"}
    if any(part["type"] not in known or part.get("stop") for part in parts):
        return None
    texts = ((token, backend.decode([token])) for token in token_ids)
    return next((token for token, text in texts if text.strip() and UNFINISHED not in text), None)


def _prompt_end(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> list[int]:
    """The last visible tokens of a prompt; they do not begin within a run of byte tokens."""
    window: list[int] = []
    for token in reversed(prompt_ids):
        if len(window) >= PROMPT_WINDOW and not tokenizer.is_byte(window[-1]):
            break
        window += tokenizer.visible((token,))
    window.reverse()
    return window


def _common(first: str, second: str) -> int:
    pairs = zip(first, second)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _byte_tokens(backend: tokenizers.Tokenizer) -> frozenset[int]:
    found = {token for byte in range(256) if (token := backend.token_to_id(f"<0x{byte:02X}>")) is not None}
    letter = backend.token_to_id("<0x41>")
    # These tokens may be ordinary text, so check how the decoder treats one.
    return frozenset(found if letter is not None and backend.decode([letter], skip_special_tokens=False) == "A" else ())
