"""The live page's files: package data, read once. It needs nothing but this listener."""

from __future__ import annotations

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_SCRIPTS = ("page", "parts", "table", "charts", "endpoints", "decisions")
FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    **{f"/{name}.js": (f"{name}.js", "text/javascript; charset=utf-8") for name in _SCRIPTS},
}


class Page:
    """`/` and what it loads."""

    def __init__(self) -> None:
        folder = files("kvproxy.admin") / "static"
        self._files = {path: ((folder / name).read_bytes(), kind) for path, (name, kind) in FILES.items()}

    def routes(self) -> list[Route]:
        """Their paths."""
        return [Route(path, self._file, methods=["GET"]) for path in self._files]

    async def _file(self, request: Request) -> Response:
        body, kind = self._files[request.url.path]
        return Response(body, headers={"content-type": kind, "cache-control": "no-cache"})
