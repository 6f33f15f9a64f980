"""Text and media of one prompt on one scale: bytes of its canonical form and tokens. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kvproxy.cache.media.cut import HEAD_OF_STAND_IN, Medium


class MixedPrompt:
    """Tokens of a prompt with media by position: text at one ratio, each medium at its own count."""

    __slots__ = ("_bytes_per_token", "_media", "_tokens", "media_tokens")

    def __init__(self, media: Sequence[Medium], tokens: Sequence[int], *, bytes_per_token: float) -> None:
        self._media = media
        self._tokens = tokens
        self._bytes_per_token = bytes_per_token
        self.media_tokens = sum(tokens)

    def tokens_before(self, position: int) -> int:
        """Return the tokens in the first `position` bytes. A medium counts as soon as its key is among them."""
        text = position
        counted = 0
        for medium, tokens in zip(self._media, self._tokens, strict=True):
            if position < medium.start + HEAD_OF_STAND_IN:
                text -= max(0, position - medium.start)
                break
            text -= min(medium.size, position - medium.start)
            counted += tokens
        return int(text / self._bytes_per_token) + counted

    def tokens_matched(self, position: int, beyond: int) -> int:
        """Return the tokens that are held if the first `position` bytes are, and perhaps `beyond` further ones: of text
        alone, since another medium has nothing in common."""
        for medium in self._media:
            if position < medium.start + HEAD_OF_STAND_IN:
                return self.tokens_before(min(position + beyond, medium.start))
        return self.tokens_before(position + beyond)

    def bytes_before(self, tokens: int) -> int:
        """Return the bytes that the first `tokens` tokens stand for; a medium counts once all of it is among them."""
        position = 0
        left = tokens
        for medium, counted in zip(self._media, self._tokens, strict=True):
            text = int((medium.start - position) / self._bytes_per_token)
            if left < text + counted:
                return min(medium.start, position + int(left * self._bytes_per_token))
            left -= text + counted
            position = medium.start + medium.size
        return position + int(left * self._bytes_per_token)
