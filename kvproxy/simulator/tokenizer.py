"""A small, real tokenizer: deterministic, reversible, nothing to download.

Text is cut as GPT-like tokenizers cut it (words with their leading space, digits, punctuation, white space), so that
tokens of a prefix stay the same when text follows; each piece becomes the longest vocabulary entries that fit, and
single bytes where none does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from kvproxy.simulator.vocabulary import SPECIAL_TOKENS, build_vocabulary, output_words

_PIECE = re.compile(r" ?[^\W\d_]+| ?\d{1,3}| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")
_SPECIAL = re.compile("(" + "|".join(re.escape(special) for special in SPECIAL_TOKENS) + ")")
_CACHED_PIECES = 50_000


class Tokenizer:
    """Encodes and decodes with the built-in vocabulary, or with its smaller relative without `word_pieces`."""

    def __init__(self, *, word_pieces: bool = True) -> None:
        self._bytes_of = build_vocabulary(word_pieces=word_pieces)
        self._id_of = {entry: token for token, entry in enumerate(self._bytes_of)}
        self._longest = max(len(entry) for entry in self._bytes_of)
        self._piece = lru_cache(_CACHED_PIECES)(self._encode_piece)
        self.output_ids = tuple(self._id_of[word.encode()] for word in output_words())

    def __len__(self) -> int:
        return len(self._bytes_of)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; special tokens written out in it are recognised, as chat templates need."""
        tokens: list[int] = []
        for index, part in enumerate(_SPECIAL.split(text)):
            if index % 2:
                tokens.append(self._id_of[part.encode()])
            else:
                for piece in _PIECE.findall(part):
                    tokens += self._piece(piece)
        return tokens

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of `tokens`; bytes that are no UTF-8 become replacement characters, unknown ids a ValueError."""
        try:
            raw = b"".join([self._entry(token) for token in tokens])
        except IndexError:
            raise ValueError("token id out of range") from None
        return raw.decode("utf-8", errors="replace")

    def token_strings(self, tokens: Iterable[int]) -> list[str]:
        """The vocabulary's own spelling of each token: byte-level, a space is `Ġ` and a line feed `Ċ`."""
        return ["".join(_VISIBLE[value] for value in self._entry(token)) for token in tokens]

    def _entry(self, token: int) -> bytes:
        if token < 0:
            raise IndexError(token)
        return self._bytes_of[token]

    def _encode_piece(self, piece: str) -> tuple[int, ...]:
        raw = piece.encode()
        whole = self._id_of.get(raw)
        if whole is not None:
            return (whole,)
        tokens: list[int] = []
        start = 0
        while start < len(raw):
            end = min(len(raw), start + self._longest)
            while raw[start:end] not in self._id_of:
                end -= 1
            tokens.append(self._id_of[raw[start:end]])
            start = end
        return tuple(tokens)


def _visible_bytes() -> list[str]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {value: chr(value) for value in printable}
    for value in range(256):
        if value not in table:
            table[value] = chr(256 + len(table) - len(printable))
    return [table[value] for value in range(256)]


_VISIBLE = _visible_bytes()
