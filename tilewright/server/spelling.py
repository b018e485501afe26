"""How a single token is spelled, for logprobs: its bytes, leading space and all, where decoding it alone would not tell."""

from tilewright.engine.tokenizer import Tokenizer

__all__ = ["Spellings"]


class Spellings:
    """The bytes of each token of a tokenizer, remembered once asked for.

    Byte-level tokenizers (GPT-2, Llama 3, Qwen) write every byte as a printable character of their own: read back, a token that
    is a part of a character has exact bytes. Byte-fallback tokens such as <0x0A> are that byte. Special tokens are their names.
    Other tokens are what they add to a text that they already end, so that SentencePiece's leading spaces are there.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}
        # "\u0120" is how byte-level vocabularies write a space.
        space = tokenizer.token_to_id("\u0120")
        self._byte_level = space is not None and tokenizer.decode([space]) == " "

    def of(self, token_id: int) -> bytes:
        """The token's bytes; not valid UTF-8 where it is a part of a character."""
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._spell(token_id)
        return found

    def _spell(self, token_id: int) -> bytes:
        tokenizer = self._tokenizer
        name = tokenizer.id_to_token(token_id)
        if name is None:
            return b""
        if not tokenizer.visible([token_id]):
            return name.encode()
        if self._byte_level and all(char in _BYTES for char in name):
            return bytes(_BYTES[char] for char in name)
        if tokenizer.is_byte(token_id):
            return bytes([int(name[3:5], 16)])
        once = tokenizer.decode([token_id])
        return tokenizer.decode([token_id, token_id])[len(once) :].encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: printable ones stand for themselves, the others follow from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_alphabet()
