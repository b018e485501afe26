"""The exact bytes of a single token, for logprobs. Decoding a token alone can lose its leading space or parts of characters."""

from tilewright.engine.tokenizer import Tokenizer

__all__ = ["Spellings"]


class Spellings:
    """The bytes of the tokens of a tokenizer; results are cached.

    Byte-level tokenizers (GPT-2, Llama 3, Qwen) represent every byte by a printable character. Converted back, even a token
    that is only a part of a character has exact bytes. A byte-fallback token such as <0x0A> is that byte. A special token is
    its name. The bytes of any other token are the text that it adds after itself (the token is decoded twice in a row), so that
    SentencePiece's leading space is included.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}
        # Byte-level vocabularies represent a space by "\u0120".
        space = tokenizer.token_to_id("\u0120")
        self._byte_level = space is not None and tokenizer.decode([space]) == " "

    def of(self, token_id: int) -> bytes:
        """The token's bytes. They are not valid UTF-8 if the token is only a part of a character."""
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
    """GPT-2's characters for bytes: a printable byte is its own character, the others use the characters from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_alphabet()
