"""A small, real tokenizer: deterministic, reversible, nothing to download; and the chained hashes of token blocks.

Text is cut as GPT-like tokenizers cut it (words with their leading space, digits, punctuation, white space), so that
tokens of a prefix stay the same when text follows; each piece becomes the longest vocabulary entries that fit, and
single bytes where none does. The vocabulary: bytes, word pieces, common words with and without a leading space,
special tokens.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache

import xxhash

from kvproxy.lab.simulator.media import PlacedMedium, media_keys

_PIECES = """
th he in er an re on at en nd ti es or te of ed is it al ar st to nt ng se ha as ou io le ve co me de hi ri ro ic ne ea
ra ce li ch ll be ma si om ur ing ion ent ter est ers ate ver all ith ess con pro com per ive ure ous ist ect ity tion
ment able ance ence ight ough under over inter trans
"""
_WORDS = """
the of and to a in is it you that he was for on are with as his they be at one have this from or had by hot but some
what there we can out other were all your when up use word how said an each she which do their time if will way about
many then them would write like so these her long make thing see him two has look more day could go come did my sound
no most number who over know water than call first people may down side been now find any new work part take get place
made live where after back little only round man year came show every good me give our under name very through just form
sentence great think say help low line differ turn cause much mean before move right boy old too same tell does set
three want air well also play small end put home read hand port large spell add even land here must big high such follow
act why ask men change went light kind off need house picture try us again animal point mother world near build self
earth father head stand own page should country found answer school grow study still learn plant cover food sun four
between state keep eye never last let thought city tree cross farm hard start might story saw far sea draw left late run
while press close night real life few north open seem together next white children begin got walk example ease paper
group always music those both mark often letter until mile river car feet care second book carry took science eat room
friend began idea fish mountain stop once base hear horse cut sure watch color face wood main enough plain girl usual
young ready above ever red list though feel talk bird soon body dog family direct pose leave song measure door product
black short numeral class wind question happen complete ship area half rock order fire south problem piece told knew
pass since top whole king space heard best hour better true during hundred five remember step early hold west ground
interest reach fast verb sing listen six table travel less morning ten simple several vowel toward war lay against
pattern slow center love person money serve appear road map rain rule govern pull cold notice voice unit power town fine
certain fly fall lead cry dark machine note wait plan figure star box noun field rest correct able pound done beauty
drive stood contain front teach week final gave green oh quick develop ocean warm free minute strong special mind behind
clear tail produce fact street inch multiply nothing course stay wheel full force blue object decide surface deep moon
island foot system busy test record boat common gold possible plane stead dry wonder laugh thousand ago ran check game
shape equate miss brought heat snow tire bring yes distant fill east paint language among model token cache prefix
block request router engine prompt answer user assistant tool function parameters string type name description hello
You Be The I A It In We This What How Hello brief helpful please
"""
#: Special tokens end no word and never come out of plain text; they are matched first.
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_PIECE = re.compile(r" ?[^\W\d_]+| ?\d{1,3}| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")
_SPECIAL = re.compile("(" + "|".join(re.escape(special) for special in SPECIAL_TOKENS) + ")")
_CACHED_PIECES = 50_000


def build_vocabulary(*, word_pieces: bool = True) -> list[bytes]:
    """Token id -> bytes. The first 256 are the single bytes; the specials are the last three.

    Without `word_pieces` it is another, smaller vocabulary: other ids, and more of them for most texts.
    """
    words = dict.fromkeys(_WORDS.split())
    pieces = [piece.encode() for piece in dict.fromkeys(_PIECES.split())] if word_pieces else []
    entries = dict.fromkeys(
        [bytes([value]) for value in range(256)]
        + pieces
        + [word.encode() for word in words]
        + [b" " + word.encode() for word in words]
        + [b" " + piece for piece in pieces]
    )
    return [*entries, *(special.encode() for special in SPECIAL_TOKENS)]


def list_output_words() -> list[str]:
    """Return the output words of a simulated model: each is one token, with its leading space."""
    return [" " + word for word in dict.fromkeys(_WORDS.split()) if len(word) > 1]


class Tokenizer:
    """Encodes and decodes with the built-in vocabulary, or with its smaller relative without `word_pieces`."""

    def __init__(self, *, word_pieces: bool = True) -> None:
        self._bytes_of = build_vocabulary(word_pieces=word_pieces)
        self._id_of = {entry: token for token, entry in enumerate(self._bytes_of)}
        self._longest = max(len(entry) for entry in self._bytes_of)
        self._piece = lru_cache(_CACHED_PIECES)(self._encode_piece)
        self.slice_output_ids = tuple(self._id_of[word.encode()] for word in list_output_words())

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
        """Return the text of `tokens`; bytes that are no UTF-8 become replacement characters, unknown ids a
        ValueError."""
        try:
            raw = b"".join([self._entry(token) for token in tokens])
        except IndexError:
            raise ValueError("token id out of range") from None
        return raw.decode("utf-8", errors="replace")

    def token_strings(self, tokens: Iterable[int]) -> list[str]:
        """Return the vocabulary's own spelling of each token: byte-level, a space is `Ġ` and a line feed `Ċ`."""
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


def hash_blocks(
    token_ids: Sequence[int],
    block_size: int,
    *,
    lora: str | None = None,
    salt: str | None = None,
    media: Sequence[PlacedMedium] = (),
) -> list[int]:
    """One 64-bit hash a full block, each over its tokens and the whole prefix; LoRA, salt and media are part of the
    chain."""
    raw = memoryview(array("q", token_ids).tobytes())
    width = 8 * block_size
    extra = f"{'' if lora is None else 'l' + lora}\0{'' if salt is None else 's' + salt}"
    parent = xxhash.xxh3_64_intdigest(extra.encode())
    hashes = []
    for block, start in enumerate(range(0, len(raw) - width + 1, width)):
        if media and (keys := media_keys(media, block, block_size)):
            parent = xxhash.xxh3_64_intdigest(repr(keys).encode(), seed=parent)
        parent = xxhash.xxh3_64_intdigest(raw[start : start + width], seed=parent)
        hashes.append(parent)
    return hashes
