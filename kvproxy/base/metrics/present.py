"""Hit ratios over the last requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

#: Number of requests that a ratio covers.
WINDOW = 1000


class HitWindow:
    """Last `size` requests of one cluster whose engines reported cached tokens."""

    __slots__ = ("_kept", "_size", "cached_tokens", "hits", "prompt_tokens")

    def __init__(self, size: int = WINDOW) -> None:
        self._size = size
        self._kept: deque[tuple[int, int]] = deque()
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.hits = 0  # requests with any cached token

    def __len__(self) -> int:
        return len(self._kept)

    def add_request(self, prompt_tokens: int, cached_tokens: int) -> None:
        """One request, by the engine's own count."""
        kept = self._kept
        if len(kept) >= self._size:
            prompt, cached = kept.popleft()
            self.prompt_tokens -= prompt
            self.cached_tokens -= cached
            self.hits -= cached > 0
        kept.append((prompt_tokens, cached_tokens))
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens
        self.hits += cached_tokens > 0


class HitWindows:
    """One window a cluster."""

    def __init__(self) -> None:
        self._windows: dict[str, HitWindow] = {}

    def of(self, cluster: str) -> HitWindow:
        """Return the window of this cluster, made on first use."""
        window = self._windows.get(cluster)
        if window is None:
            window = self._windows[cluster] = HitWindow()
        return window

    def hit_ratios(self) -> Iterable[tuple[tuple[str, ...], float]]:
        """By cluster and by what is counted; nothing before the first request."""
        return self._ratios(lambda share: share)

    def miss_ratios(self) -> Iterable[tuple[tuple[str, ...], float]]:
        """Return what is missing to one."""
        return self._ratios(lambda share: 1.0 - share)

    def sizes(self) -> Iterable[tuple[tuple[str, ...], float]]:
        """Return requests each ratio is taken over."""
        return [((name,), float(len(window))) for name, window in list(self._windows.items())]

    def _ratios(self, shown: Callable[[float], float]) -> Iterable[tuple[tuple[str, ...], float]]:
        for name, window in list(self._windows.items()):
            if len(window):
                yield (name, "requests"), shown(window.hits / len(window))
            if window.prompt_tokens:
                yield (name, "tokens"), shown(window.cached_tokens / window.prompt_tokens)
