"""Detection of a host app's inference requests, wherever they are mounted."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from starlette.types import Scope

from kvproxy.base.errors import ConfigError, Problem
from kvproxy.base.types import RequestKind

log = logging.getLogger("kvproxy.kvcache")

#: Suffixes of paths, by their last part; the longest match counts.
_ENDS: Mapping[str, tuple[tuple[str, RequestKind], ...]] = {
    "completions": (("/chat/completions", RequestKind.CHAT), ("/completions", RequestKind.COMPLETION)),
    "responses": (("/v1/responses", RequestKind.RESPONSES),),
    "embeddings": (("/embeddings", RequestKind.EMBEDDINGS),),
    "messages": (("/v1/messages", RequestKind.MESSAGES),),
}
#: One look at most paths that are none of these.
_LAST = tuple(f"/{name}" for name in _ENDS)
_KINDS = {kind.value: kind for kind in RequestKind}


def kind_of_end(path: str) -> RequestKind | None:
    """Return the kind by the end of a path, whatever prefix it has."""
    for end, kind in _ENDS.get(path[path.rfind("/") + 1 :], ()):
        if path.endswith(end):
            return kind
    return None


class CoveredPaths:
    """The paths that a middleware covers: by default those of inference below any prefix; else exactly those named, as
    the app sees them below its root."""

    def __init__(self, paths: Mapping[str, str] | Iterable[str] | None) -> None:
        self._named = None if paths is None else _read(paths)
        self.missed = ""  # the first path that looks like inference and is not covered

    def kind_of(self, scope: Scope) -> RequestKind | None:
        """Return the kind of a covered request; None for any other."""
        if scope["method"] != "POST":
            return None
        path: str = scope["path"]
        if self._named is None:
            return kind_of_end(path) if path.endswith(_LAST) else None
        kind = self._named.get(path.removeprefix(scope.get("root_path", "")))
        if kind is None and not self.missed and kind_of_end(path) is not None:
            self.missed = path[:200]
            log.warning("[kvcache] POST %s looks like inference but is not in `paths`: it passes without facts", path)
        return kind


def _read(paths: Mapping[str, str] | Iterable[str]) -> dict[str, RequestKind]:
    given = dict(paths) if isinstance(paths, Mapping) else {path: kind_of_end(path) for path in paths}
    found = {}
    problems = []
    for path, kind in given.items():
        known = _KINDS.get(kind) if isinstance(kind, str) else kind
        if known is None:
            problems.append(Problem(f"paths.{path}", "unknown kind", f"{{path: one of {', '.join(_KINDS)}}}"))
        else:
            found[path] = known
    if problems:
        raise ConfigError(problems)
    return found
