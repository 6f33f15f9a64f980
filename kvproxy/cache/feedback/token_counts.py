"""Learning from engines' own token counts: bytes per token, and the reused share of prompts."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvproxy.base.bounded import BoundedMapping
from kvproxy.base.types import EndpointId
from kvproxy.cache.clients.engine_metrics import EngineMetrics

#: English prose with JSON around it; replaced after a model's first responses.
DEFAULT_BYTES_PER_TOKEN = 4.0
#: Bounds on a single response's ratio: one token per byte, or long runs of whitespace and base64.
_LEAST = 0.5
_MOST = 64.0
#: Shorter prompts are mostly template.
_MIN_TOKENS = 16
_WEIGHT = 0.05


class BytesPerToken:
    """One ratio a model, an average that follows the traffic. Bounded: the model least recently answered is forgotten.

    A dict in the order of the answers: a BoundedMapping takes eight Python calls for each answer instead of one, more
    than hashing a short prompt.
    """

    def __init__(self, *, max_models: int = 256) -> None:
        self._ratios: dict[str, float] = {}
        self._max_models = max_models

    def __len__(self) -> int:
        return len(self._ratios)

    def look_up(self, model: str) -> float:
        """Bytes a token of `model`."""
        return self._ratios.get(model, DEFAULT_BYTES_PER_TOKEN)

    def knows(self, model: str) -> bool:
        """Return whether some prompt of `model` was counted."""
        return model in self._ratios

    @property
    def typical(self) -> float:
        """Bytes a token over the models known."""
        return sum(self._ratios.values()) / len(self._ratios) if self._ratios else DEFAULT_BYTES_PER_TOKEN

    @property
    def learned(self) -> Mapping[str, float]:
        """By model, the one least recently answered first."""
        return dict(self._ratios)

    def resume_from(self, learned: Mapping[str, float]) -> None:
        """Go on from what was learned in an earlier life; what cannot be true is left out."""
        for model, ratio in list(learned.items())[-self._max_models :]:
            if _LEAST <= ratio <= _MOST:
                self._ratios[model] = ratio

    def observe_prompt(self, model: str, prompt_bytes: int, prompt_tokens: int) -> None:
        """Learn from an engine's count of `prompt_tokens` in a prompt of `prompt_bytes`."""
        if prompt_tokens < _MIN_TOKENS or prompt_bytes <= 0:
            return
        seen = min(max(prompt_bytes / prompt_tokens, _LEAST), _MOST)
        known = self._ratios.pop(model, None)
        if known is None and len(self._ratios) >= self._max_models:
            del self._ratios[next(iter(self._ratios))]
        self._ratios[model] = seen if known is None else known + _WEIGHT * (seen - known)


#: Prompts whose count is kept: at 150 bytes each.
_MAX_COUNTED = 65_536
#: Messages between the end of a chat's last prompt and that of its next one, at most.
_LOOKED_BACK = 16


class CountedPrompts:
    """Bytes per token of counted prompts, by the key of their last message: for a chat's next turn they are more
    accurate than the average of all traffic. Bounded: the least recently counted is forgotten."""

    def __init__(self) -> None:
        self._ratios: BoundedMapping[int, float] = BoundedMapping(_MAX_COUNTED)

    def __len__(self) -> int:
        return len(self._ratios)

    def note_prompt(self, keys: Sequence[int], prompt_bytes: int, prompt_tokens: int) -> None:
        """Note an engine's count of `prompt_tokens` in the prompt with these keys."""
        if keys and prompt_tokens >= _MIN_TOKENS:
            self._ratios[keys[-1]] = min(max(prompt_bytes / prompt_tokens, _LEAST), _MOST)

    def find_ratio(self, keys: Sequence[int]) -> float | None:
        """Of the longest beginning of the prompt with these keys that was counted."""
        ratios = self._ratios
        for at in range(len(keys) - 1, max(len(keys) - 1 - _LOOKED_BACK, -1), -1):
            ratio = ratios.get(keys[at])
            if ratio is not None:
                return ratio
        return None


#: Scrapes the ratios are taken over: the last minute at the usual five seconds.
SCRAPES = 13
#: Fewer tokens than these in that time make no ratio.
_LEAST_TOKENS = 2_000

Key = tuple[str, EndpointId]  # cluster, endpoint


@dataclass(frozen=True, slots=True)
class CacheUse:
    """Shares of prompt tokens over the last scrapes. None: too few, or no source reports it."""

    engine: float | None  # reused, by the engine's own counters, for all its clients
    responses: float | None  # reused, by responses to this proxy
    prediction: float | None  # expected to be reused when they were placed
    foreign: float | None  # that the engine looked up and this proxy did not send


@dataclass(frozen=True, slots=True)
class _Reading:
    queries: int
    hits: int
    prompt: int
    cached: int
    predicted: int


class _EndpointCounts:
    __slots__ = ("cached", "predicted", "prompt", "readings")

    def __init__(self) -> None:
        self.prompt = self.cached = self.predicted = 0
        self.readings: deque[_Reading] = deque(maxlen=SCRAPES)


class HitRatioStats:
    """Bounded by the endpoints there are: `keep_only` forgets the others."""

    def __init__(self) -> None:
        self._endpoints: dict[Key, _EndpointCounts] = {}

    def count_response(self, key: Key, *, prompt_tokens: int, cached_tokens: int, predicted_tokens: int) -> None:
        """Count a response from the endpoint."""
        counts = self._endpoints.get(key)
        if counts is None:
            counts = self._endpoints[key] = _EndpointCounts()
        counts.prompt += prompt_tokens
        counts.cached += cached_tokens
        counts.predicted += predicted_tokens

    def read_counters(self, key: Key, metrics: EngineMetrics) -> bool:
        """Return the engine's counters now. True: they began at zero again, as those of a process that restarted."""
        queries = metrics.prefix_queries_tokens
        hits = metrics.prefix_hits_tokens
        if queries is None or hits is None:
            return False
        counts = self._endpoints.setdefault(key, _EndpointCounts())
        restarted = bool(counts.readings) and queries < counts.readings[-1].queries
        if restarted:
            counts.readings.clear()
        counts.readings.append(_Reading(queries, hits, counts.prompt, counts.cached, counts.predicted))
        return restarted

    def read_shares(self, key: Key) -> CacheUse:
        """Return the recent shares."""
        counts = self._endpoints.get(key)
        if counts is None or len(counts.readings) < 2:
            return CacheUse(None, None, None, None)
        first = counts.readings[0]
        last = counts.readings[-1]
        looked_up = last.queries - first.queries
        sent = last.prompt - first.prompt
        return CacheUse(
            engine=_share(last.hits - first.hits, looked_up),
            responses=_share(last.cached - first.cached, sent),
            prediction=_share(last.predicted - first.predicted, sent),
            foreign=_share(looked_up - sent, looked_up),
        )

    def hit_series(self) -> Iterable[tuple[tuple[str, ...], float]]:
        """Hit ratios by source of the count."""
        for key in list(self._endpoints):
            use = self.read_shares(key)
            for by in ("engine", "responses", "prediction"):
                ratio = getattr(use, by)
                if ratio is not None:
                    yield (*map(str, key), by), ratio

    def foreign_series(self) -> Iterable[tuple[tuple[str, ...], float]]:
        """Share of others."""
        for key in list(self._endpoints):
            foreign = self.read_shares(key).foreign
            if foreign is not None:
                yield tuple(map(str, key)), foreign

    def keep_only(self, present: Collection[Key]) -> None:
        """Forget all endpoints but these."""
        self._endpoints = {key: counts for key, counts in self._endpoints.items() if key in present}


def _share(part: int, whole: int) -> float | None:
    return None if whole < _LEAST_TOKENS else min(1.0, max(0.0, part / whole))
