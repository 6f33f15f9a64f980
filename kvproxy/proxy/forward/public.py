"""Public paths and their answers before routing: pages of the proxy's own, and refusals. Engines have many more paths,
which load adapters, clear caches or stop the engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from starlette.types import Scope, Send

from kvproxy.base.metrics.groups import Metrics
from kvproxy.base.types import Clock, Headers
from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.routes import clusters_without_endpoint
from kvproxy.proxy.request.error_reply import local_reply

#: Inference, and paths that clients need beside it, by their names in vLLM, SGLang and the like.
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
NO_WEBSOCKET = "kvproxy does not carry WebSockets: connect to an engine."
_GREETING = b"clients use /v1\n"


class PublicSide:
    """Answers `GET /`, the health path, and 400, 404 or 501 for requests that may not pass."""

    def __init__(
        self,
        paths: PublicPaths,
        *,
        health_path: str,
        clusters: Mapping[str, Cluster],
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self._paths = paths
        #: Most requests have one of these paths; they need no further test.
        self.exact = paths.exact - {health_path}
        self._health_path = health_path
        self._clusters = clusters
        self._metrics = metrics
        self._clock = clock

    async def answered(self, scope: Scope, send: Send) -> bool:
        """Answer a request whose path is not among `exact` if it is not to be routed; return True if so."""
        path = scope["path"]
        reads = scope["method"] in ("GET", "HEAD")
        if path == self._health_path and not reads:
            message = f"`{path}` answers GET and HEAD."
            await self._refuse(scope, send, 405, "method_not_allowed", message, [(b"allow", b"GET, HEAD")])
        elif path == self._health_path:
            without = clusters_without_endpoint(self._clusters, self._clock())
            text = f"no endpoint in {', '.join(without)}\n" if without else "ok\n"
            await _text(send, 503 if without else 200, text.encode())
        elif has_dot_segment(path):
            message = "The path has a segment `.` or `..`: send it resolved."
            await self._refuse(scope, send, 400, "dot_segment", message)
        elif any(name == b"sec-websocket-key" for name, _ in scope["headers"]):
            await self._refuse(scope, send, 501, "no_websocket", NO_WEBSOCKET)
        elif path in self._paths:
            return False
        elif reads and path == "/":
            await _text(send, 200, _GREETING)
        else:
            await self._refuse(scope, send, 404, "path_not_public", f"Not found: `{path[:200]}`.")
        return True

    async def _refuse(
        self, scope: Scope, send: Send, status: int, reason: str, message: str, headers: Headers | None = None
    ) -> None:
        await local_reply(
            scope, send, status=status, reason=reason, message=message, metrics=self._metrics, headers=headers
        )


class PublicPaths:
    """Exact paths, and those ending in `/` with all that is below them.

    `further` widens the defaults; ALL opens every path. A route opens its own prefix if no default path can match it:
    such a route could never be used otherwise, so its prefix must be meant. `/v1` only routes; `/tts` opens `/tts`.
    A path with one `/` behind it is public as well: engines redirect it to the path. `exact` are the paths without what
    is below others.
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
        return path in self.exact or self._all or path.startswith(self._below) or path.removesuffix("/") in self.exact


def _below(path: str, prefix: str) -> bool:
    return path.rstrip("/") == prefix or path.startswith(prefix + "/")


def has_dot_segment(path: str) -> bool:
    """Return True if a decoded path has a segment `.` or `..`, which the next server may resolve to another path. Some
    servers take the part after `;` as the segment's parameters (RFC 3986 3.3)."""
    if "/." not in path and "\\" not in path:
        return False
    return any(segment.partition(";")[0] in (".", "..") for segment in path.replace("\\", "/").split("/"))


async def _text(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
