"""Placeholder tokens that engines make of media, learned from their usage by model, size and content."""

from __future__ import annotations

from collections.abc import Sequence

from kvproxy.base.bounded import BoundedMapping
from kvproxy.cache.media.cut import Medium, MediumKind
from kvproxy.cache.media.placeholders import guess_tokens

#: Media, and sizes of media, whose count is kept: at 200 bytes each.
_MAX_KEPT = 16_384
_MAX_MODELS = 256
#: Weight of a new estimate of a size.
_WEIGHT = 0.3
_MOST = 1 << 20

_Size = tuple[str, MediumKind, int, int]  # with the model


class MediaCounts:
    """The count of a medium is that of its content where an engine reported it, else that of its size, else the count
    that all sizes of its model have, else the guess by the model's family."""

    def __init__(self) -> None:
        self._by_key: BoundedMapping[tuple[str, str], int] = BoundedMapping(_MAX_KEPT)
        self._by_size: BoundedMapping[_Size, float] = BoundedMapping(_MAX_KEPT)
        #: Of a model: a count, a size that has it, and whether another size has it as well.
        self._uniform: BoundedMapping[str, tuple[int, _Size, bool]] = BoundedMapping(_MAX_MODELS)

    def __len__(self) -> int:
        return len(self._by_key)

    def look_up(self, model: str, medium: Medium) -> int:
        """Return the placeholder tokens of a medium."""
        exact = self._by_key.get((model, medium.key))
        if exact is not None:
            return exact
        learned = self._by_size.get(_size(model, medium))
        if learned is not None:
            return round(learned)
        uniform = self._uniform.get(model)
        return uniform[0] if uniform is not None and uniform[2] else guess_tokens(model, medium)

    def find_count(self, model: str, media: Sequence[Medium]) -> int | None:
        """Return the tokens of all these media, if each was counted."""
        counts = [self._by_key.get((model, medium.key)) for medium in media]
        known = [count for count in counts if count is not None]
        return sum(known) if len(known) == len(counts) else None

    def observe_count(self, model: str, media: Sequence[Medium], tokens: int) -> None:
        """Learn from the engine's count of tokens for all media of a prompt."""
        if not 0 < tokens <= _MOST:
            return
        known = {medium.key: self._by_key.get((model, medium.key)) for medium in media}
        rest = tokens - sum(known[medium.key] or 0 for medium in media)
        unknown = [medium for medium in media if known[medium.key] is None]
        if not unknown or rest < len(unknown):
            if rest:
                self._forget(model, media)
            return
        sizes = {_size(model, medium) for medium in unknown}
        if len(sizes) == 1 and rest % len(unknown) == 0:
            self._note_exact(model, unknown, rest // len(unknown))
        else:
            self.observe_estimate(model, unknown, rest)

    def note_medium(self, model: str, medium: Medium, tokens: int) -> None:
        """Learn the count of one medium, as KV events show it, unless it is known."""
        if 0 < tokens <= _MOST and (model, medium.key) not in self._by_key:
            self._note_exact(model, (medium,), tokens)

    def observe_estimate(self, model: str, media: Sequence[Medium], tokens: int) -> None:
        """Learn from an estimate of the tokens for all media of a prompt."""
        guesses = [self.look_up(model, medium) for medium in media]
        scale = min(max(tokens, len(media)), _MOST) / max(1, sum(guesses))
        for medium, guess in zip(media, guesses, strict=True):
            size = _size(model, medium)
            seen = guess * scale
            known = self._by_size.get(size)
            self._by_size[size] = seen if known is None else known + _WEIGHT * (seen - known)

    def _note_exact(self, model: str, media: Sequence[Medium], tokens: int) -> None:
        size = _size(model, media[0])
        for medium in media:
            self._by_key[model, medium.key] = tokens
        self._by_size[size] = float(tokens)
        uniform = self._uniform.get(model)
        if uniform is None or uniform[0] != tokens:
            self._uniform[model] = tokens, size, False
        elif uniform[1] != size:
            self._uniform[model] = tokens, size, True

    def _forget(self, model: str, media: Sequence[Medium]) -> None:
        for medium in media:
            self._by_key.pop((model, medium.key), None)


def _size(model: str, medium: Medium) -> _Size:
    return model, medium.kind, medium.width, medium.height
