"""Which paths clients may ask for. Engines have many more: those load adapters, clear caches, stop the engine."""

from __future__ import annotations

from collections.abc import Iterable

#: Inference and what clients need beside it, as vLLM, SGLang and their like call it.
DEFAULT_PATHS = (
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/chat/completions/render",
    "/v1/completions",
    "/v1/completions/render",
    "/v1/responses",
    "/v1/responses/",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/messages/render",
    "/v1/embeddings",
    "/v1/models",
    "/v1/models/",
    "/v1/moderations",
    "/v1/audio/",
    "/v1/images/",
    "/v1/score",
    "/v1/rerank",
    "/v2/rerank",
    "/v2/embed",
    "/v1/pooling",
    "/v1/classify",
    "/v1/tokenize",
    "/v1/detokenize",
    "/score",
    "/rerank",
    "/pooling",
    "/classify",
    "/encode",
    "/generate",
    "/tokenize",
    "/detokenize",
)
ALL = "all"


class PublicPaths:
    """Exact paths, and those ending in `/` with all that is below them.

    `further` widens the defaults; ALL opens every path. A route opens its own prefix if no default path can match it:
    such a route could never be used otherwise, so its prefix must be meant. `/v1` only routes; `/tts` opens `/tts`.
    `exact` are the paths without what is below others.
    """

    def __init__(self, further: Iterable[str] = (), *, prefixes: Iterable[str] = ()) -> None:
        listed = [*DEFAULT_PATHS, *further]
        self._all = ALL in listed
        for prefix in prefixes:
            own = prefix.rstrip("/")
            if own and not any(_below(path, own) for path in DEFAULT_PATHS):
                listed += [own, own + "/"]
        self.exact = frozenset(listed)
        self._below = tuple(sorted({path for path in listed if path.endswith("/")}))

    def __contains__(self, path: str) -> bool:
        return path in self.exact or self._all or path.startswith(self._below)


def _below(path: str, prefix: str) -> bool:
    return path.rstrip("/") == prefix or path.startswith(prefix + "/")


def has_dot_segment(path: str) -> bool:
    """Whether a decoded path has a segment `.` or `..`, which the next server may resolve to another path. What
    follows a `;` are a segment's parameters to some (RFC 3986 3.3)."""
    if "/." not in path and "\\" not in path:
        return False
    return any(segment.partition(";")[0] in (".", "..") for segment in path.replace("\\", "/").split("/"))
