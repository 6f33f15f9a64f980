"""Identity of prompts in one cluster: hashes of their text, keys of their message prefixes, names of sessions."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from functools import lru_cache

from kvproxy.base.types import InferenceRequest, RequestKind
from kvproxy.cache.clients.engine_metrics import EngineKind
from kvproxy.cache.media.cut import Medium, cut_prompt
from kvproxy.cache.overlap.index_state import FollowedEvents, IndexState
from kvproxy.cache.overlap.last_served import RequestNames
from kvproxy.cache.prefix.hashing import TEXT_BLOCK_BYTES, message_chain, root_seed, text_blocks
from kvproxy.cache.prefix.prompt_identity import RULED, are_texts, prompt_identity
from kvproxy.cache.prefix.session_hashes import PromptText

#: Models and cache salts whose chains were begun recently; salts come from clients.
REMEMBERED_SEEDS = 1024
#: Hashing all of a shorter prompt takes less than finding the part known from an earlier turn of its chat.
SHORT_BYTES = 4096


def _seed(model: str, cache_salt: str | None) -> int:
    return root_seed(block_size=TEXT_BLOCK_BYTES, model=model, cache_salt=cache_salt)


class PromptHashes:
    """Names prompts as their cluster's engines read them. With `keyed` short ones get keys too."""

    def __init__(self, state: IndexState, followed: FollowedEvents, *, keyed: bool) -> None:
        self._state = state
        self._sessions = state.sessions
        self._followed = followed
        self._keyed = keyed
        self._seed = lru_cache(REMEMBERED_SEEDS)(_seed)

    def hash_prompt(
        self, request: InferenceRequest, model: str
    ) -> tuple[array[int], Sequence[int], int, PromptText | None, tuple[Medium, ...]]:
        """Return the prompt's text blocks, empty for a prompt shorter than one, a key for each message prefix, shortest
        first, the bytes of all of it, a conversation's text by message, as they name it (`prompt_identity`), and its
        media, in whose place stand-ins are hashed and counted. Of a short one there are keys only where something goes
        by them. Blocks and keys are not to be changed.
        """
        seed = self._seed(model, request.cache_salt)
        prompt = request.prompt
        kind = request.kind
        drops_header = self._state.drops_header
        size_bytes = prompt.size_bytes
        short = size_bytes <= SHORT_BYTES and not self._keyed and not self._followed.any
        if kind in RULED and not short:
            hashes, keys, prompt_bytes, told = self._sessions.identified(kind, prompt, seed, drops_header=drops_header)
            return hashes, keys, prompt_bytes, told, () if told is None else told.media
        media: tuple[Medium, ...] = ()
        if kind is not RequestKind.CHAT or not are_texts(prompt.parts):
            prompt, media = cut_prompt(prompt, self._sessions.signatures)
            prompt = prompt_identity(kind, prompt, drops_header=drops_header)
            size_bytes = prompt.size_bytes
        keys = () if short else message_chain(prompt, seed)
        if not keys:
            return text_blocks(prompt, seed), (), size_bytes, None, media
        text = PromptText.of_prompt(prompt)
        prompt_bytes = text.size - 1 - text.parts + prompt.unread_bytes  # without the end mark of the parts
        told = text if kind is RequestKind.RESPONSES else None
        return self._sessions.blocks_of(text, seed, keys), keys, prompt_bytes, told, media

    def note_kinds(self, kinds: Collection[EngineKind]) -> None:
        """Note the kinds of the cluster's engines: they agree on most of a prompt's identity, but not on all."""
        self._state.drops_header = set(kinds) != {EngineKind.SGLANG}

    def name_request(self, request: InferenceRequest, model: str, tenant: str) -> RequestNames:
        """Return the hashed identifiers of a request's session and of the response that it continues."""
        return RequestNames.name_request(request, self._seed(model, request.cache_salt), tenant)
