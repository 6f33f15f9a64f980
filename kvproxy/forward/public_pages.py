"""What the public listener answers by itself before it routes: its own pages, and paths that are not public."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.types import Scope, Send

from kvproxy.cluster.cluster import Cluster
from kvproxy.cluster.readiness import clusters_without_endpoint
from kvproxy.forward.public_paths import PublicPaths, has_dot_segment
from kvproxy.metrics.catalog import Metrics
from kvproxy.request.error_reply import local_reply
from kvproxy.types import Clock

_GREETING = b"kvproxy; clients use /v1\n"


class PublicSide:
    """Answers `GET /`, the health path, and 400 or 404 for what may not pass."""

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
        #: Most requests ask for one of these; they need no further look.
        self.exact = paths.exact - {health_path}
        self._health_path = health_path
        self._clusters = clusters
        self._metrics = metrics
        self._clock = clock

    async def answered(self, scope: Scope, send: Send) -> bool:
        """Whether this request, whose path is not among `exact`, was answered here."""
        path, reads = scope["path"], scope["method"] in ("GET", "HEAD")
        if reads and path == self._health_path:
            without = clusters_without_endpoint(self._clusters, self._clock())
            text = f"no endpoint in {', '.join(without)}\n" if without else "ok\n"
            await _text(send, 503 if without else 200, text.encode())
        elif has_dot_segment(path):
            message = "The path has a segment `.` or `..`: send it resolved."
            await self._refuse(scope, send, 400, "dot_segment", message)
        elif path in self._paths:
            return False
        elif reads and path == "/":
            await _text(send, 200, _GREETING)
        else:
            message = (
                f"`{path[:200]}` is not a public path; `router.paths` in the proxy's configuration opens further ones."
            )
            await self._refuse(scope, send, 404, "path_not_public", message)
        return True

    async def _refuse(self, scope: Scope, send: Send, status: int, reason: str, message: str) -> None:
        await local_reply(scope, send, status=status, reason=reason, message=message, metrics=self._metrics)


async def _text(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
