"""Text <-> token ids, and text from tokens as they come.

tokenizer_files.py reads a model folder's. Not supported: `clean_up_tokenization_spaces`, which would make the text of a token
depend on those after it.
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
"""What a decoder writes for bytes that are no character, or not yet one."""
SHORT_CHARS = 2048
"""Texts up to this are encoded at once, in well under a millisecond; the way that lets other threads run costs 50 us."""
_BARRED = re.compile(r"<[|\uff5c].*[|\uff5c]>", re.DOTALL)
PROMPT_WINDOW = 8
"""Tokens of the prompt's end that generated text is decoded with: a character has 4 bytes, so 4 tokens, at most."""


class TokenizerError(ValueError):
    """A tokenizer folder is missing, incomplete or corrupt."""


class Tokenizer:
    """A `tokenizers.Tokenizer` with what the engine needs around it. Use `Tokenizer.load(folder)` for a model's.

    Args:
        backend: truncation and padding in it are switched off.
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
        """What `suffix` has found so far; a text stream looks here first."""
        self._chat = None if chat_template is None else ChatTemplate(chat_template, special)
        added = {token.content: token.special for token in backend.get_added_tokens_decoder().values()}
        named = [text for text in added if text.strip() and (text in (chat_template or "") or _BARRED.fullmatch(text))]
        self._special_texts = starts(text for text, special in added.items() if special)
        self._control_texts = starts([*named, *(text for text, special in added.items() if special)])

    @classmethod
    def load(cls, folder: str | Path) -> "Tokenizer":
        """The tokenizer of a model folder. Raises TokenizerError with the file and what is wrong with it."""
        # Here, because those who get their tokenizer otherwise need nothing of the models, nor torch, which they import.
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
        """Token ids of a text; `add_special`: with what the model's files put around it, such as BOS.

        A special token written out in the text becomes that token. Other threads run while a long text is encoded.

        Raises:
            TokenizerError: the library fails on this text.
        """
        try:
            if len(text) <= SHORT_CHARS:
                return self._backend.encode(text, add_special_tokens=add_special).ids
            return self._backend.encode_batch_fast([text], add_special_tokens=add_special)[0].ids  # without Python's lock
        except BaseException as error:
            # A fault inside the library, such as a regular expression that gives up, is no `Exception` of Python's.
            if type(error).__name__ == "PanicException" or type(error) is Exception:
                raise TokenizerError(f"the tokenizer fails on this text: {str(error)[:200]}") from None
            raise

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """(token ids of two texts as the model reads them together, which of the two each is of). Raises TokenizerError."""
        try:
            found = self._backend.encode(first, second)
        except BaseException as error:
            if type(error).__name__ == "PanicException" or type(error) is Exception:
                raise TokenizerError(f"the tokenizer fails on these texts: {str(error)[:200]}") from None
            raise
        return found.ids, found.type_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the tokens, without special and unknown ones. Bytes that are no UTF-8 become U+FFFD."""
        return self._backend.decode(self.visible(token_ids), skip_special_tokens=False)

    @property
    def chat_template(self) -> str | None:
        """The source of the chat template, None if there is none."""
        return None if self._chat is None else self._chat.source

    def spelled(self, token_ids: Sequence[int]) -> str:
        """The text of the tokens, the names of special ones in it."""
        return self._backend.decode(list(token_ids), skip_special_tokens=False)

    def to_json(self) -> str:
        """The tokenizer as the text of a `tokenizer.json`."""
        return self._backend.to_str()

    def id_to_token(self, token_id: int) -> str | None:
        """What the vocabulary calls a token, which is not its text ("\u0120the", "<0x0A>", "<s>"); None if it has none."""
        return self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None

    def token_to_id(self, token: str) -> int | None:
        """The token that the vocabulary calls so, None if there is none."""
        return self._backend.token_to_id(token)

    def visible(self, token_ids: Iterable[int]) -> list[int]:
        """Those of the tokens that have a text: not special and in the vocabulary."""
        hidden, size = self._hidden, self.vocab_size
        return [token for token in token_ids if 0 <= token < size and token not in hidden]

    def suffix(self, token_id: int) -> str | None:
        """The text that a visible token adds wherever the text before it is complete, if it is the same everywhere.

        None for a token that holds part of a character or is a byte, and for all where the decoder is not one of those known
        to treat tokens one by one.
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
        """True for a byte-fallback token such as <0x0A>. A decoder joins neighbours to characters, all of a run or none."""
        return token_id in self._bytes

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The text of a conversation, to be encoded with `add_special=False`. Raises ChatTemplateError.

        `variables`: add_generation_prompt (True unless given), tools, and what else the template understands.
        """
        if self._chat is None:
            raise ChatTemplateError("this model has no chat template (it is a base model); wanted a plain prompt instead")
        return self._chat(messages, **variables)

    def chat_ids(self, messages: Sequence[Mapping[str, Any]], *, allow_special: bool = False, **variables: Any) -> list[int]:
        """Token ids of a conversation, through the chat template. Raises ChatTemplateError or TokenizerError.

        What is written in the messages is text: a control token that is spelled out there, by which a turn could be forged, is
        encoded in pieces, none of which is that token. Control tokens are the special ones and, of the other added ones, those
        that the template names or that are written <|so|>; in assistant turns only the special ones, since templates look for
        the others there ("</think>"). With `allow_special` they are what they spell. One of a single character is never text.
        """
        if allow_special:
            return self.encode(self.apply_chat_template(messages, **variables), add_special=False)
        cut, safe = self.safe(messages, variables)
        pieces = self.apply_chat_template(safe, **cut.apart(variables, self._control_texts)).split(cut.mark)
        return [token for piece in pieces for token in self.encode(piece, add_special=False)]

    def safe(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> tuple[Cut, list[Any]]:
        """Messages with marks where their text would spell control tokens."""
        cut = Cut(json.dumps([messages, variables], ensure_ascii=False, default=str))
        texts = {True: self._special_texts, False: self._control_texts}
        return cut, [cut.apart(one, texts[one.get("role") == "assistant"]) for one in messages]


class Detokenizer:
    """The text of generated tokens, as they come.

    The pieces, joined, are what the tokens add to the prompt when all are decoded at once: with `p = decode(prompt)` and
    `f = decode(prompt + generated)`, what `f` has beyond the longest common prefix of the two. A piece never ends within a
    character; bytes that may become one are held back. The decoders of byte-fallback tokenizers turn a run of byte tokens
    into text only if all of it is UTF-8, so there the whole run waits for its end.

    With `special` the names of special tokens stand in the text, where they were generated.

    Only a short window of tokens is decoded at a time, from one before which the text is complete; most tokens not even so
    (`Tokenizer.suffix`).
    """

    __slots__ = ("_complete", "_given", "_run", "_special", "_suffixes", "_tokenizer", "_window", "open")

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), *, special: bool = False):
        self._tokenizer = tokenizer
        self._suffixes = tokenizer.suffixes
        self._special = special
        self._window = _prompt_end(tokenizer, prompt_ids)
        self._given = tokenizer.decode(self._window)  # text of the window that the reader has: the prompt's, then ours
        self._run = 0  # byte-fallback tokens at the window's end
        while self._run < len(self._window) and tokenizer.is_byte(self._window[-1 - self._run]):
            self._run += 1
        # There is text before, and nothing that comes can change it.
        self._complete = bool(self._given) and not self._run and not self._given.endswith(UNFINISHED)
        self.open = False
        """True while tokens have come whose text is held back."""

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens add, as far as it is complete."""
        text = ""
        for token in token_ids:
            text += self.push_one(token)
        return text

    def push_one(self, token: int) -> str:
        """The same of one token."""
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
        # An unfinished character is one UNFINISHED, at the end; those before it are final.
        final = text[:-1] if text.endswith(UNFINISHED) else text
        new = self._beyond(final)
        if new:
            self._given = final
        if final is text and not self._run:
            self._window = window[-1:]
            self._complete, self.open = True, False
        return new

    def _push_special(self, token: int) -> str:
        """A special token by its name: it ends whatever was open before it, and the text goes on behind it."""
        name = self._tokenizer.id_to_token(token) or ""
        text = self.peek() + name
        self._window, self._given, self._run = [token], "", 0
        self._complete, self.open = True, False
        return text

    def peek(self) -> str:
        """What `flush` would return."""
        return self._beyond(self._tokenizer.decode(self._window)) if self.open else ""

    def flush(self) -> str:
        """What is held back, when no more tokens come; bytes that are no character are U+FFFD in it."""
        text = self.peek()
        self._window, self._given, self._run, self._complete, self.open = [], "", 0, False, False
        return text

    def _beyond(self, text: str) -> str:
        given = self._given
        return text[len(given) :] if text.startswith(given) else text[_common(given, text) :]


def _anchor(backend: tokenizers.Tokenizer, token_ids: Iterable[int]) -> int | None:
    """A token with a text of its own, after which to look at others; None if the decoder is not known to allow that."""
    if backend.decoder is None:
        return None
    state = json.loads(backend.decoder.__getstate__())
    parts = state["decoders"] if state["type"] == "Sequence" else [state]
    # Each of these makes text of a token without a look at its neighbours, but for bytes that join, and the very first token.
    known = {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip"}
    if any(part["type"] not in known or part.get("stop") for part in parts):
        return None
    texts = ((token, backend.decode([token])) for token in token_ids)
    return next((token for token, text in texts if text.strip() and UNFINISHED not in text), None)


def _prompt_end(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> list[int]:
    """The last visible tokens of a prompt, not beginning within a run of byte tokens."""
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
    # The tokens may be mere text; what the decoder makes of one tells.
    return frozenset(found if letter is not None and backend.decode([letter], skip_special_tokens=False) == "A" else ())
