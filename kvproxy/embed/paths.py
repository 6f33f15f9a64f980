"""Detection of a host app's inference requests, wherever they are mounted."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from starlette.types import Scope

from kvproxy.base.errors import ConfigError, Problem
from kvproxy.base.types import RequestKind
from kvproxy.proxy.filters.inference_request import KIND_OF_PATH

log = logging.getLogger("kvproxy.kvcache")

#: Kinds whose paths are an app's own without their `/v1`.
_COMMON_WORDS = frozenset({RequestKind.RESPONSES, RequestKind.MESSAGES})
#: Ends of paths; the longest that fits counts.
_ENDS = sorted(
    ((path if kind in _COMMON_WORDS else path.removeprefix("/v1"), kind) for path, kind in KIND_OF_PATH.items()),
    key=lambda end: -len(end[0]),
)
#: One look at most paths that are none of these.
_LAST = tuple({end[end.rfind("/") :] for end, _ in _ENDS})
_KINDS = {kind.value: kind for kind in RequestKind}


def kind_of_end(path: str) -> RequestKind | None:
    """Return the kind by the end of a path, whatever prefix it has."""
    for end, kind in _ENDS:
        if path.endswith(end):
            return kind
    return None


class CoveredPaths:
    """The paths that a middleware covers: by default those of inference below any prefix; else exactly those named, as
    the app sees them below its root."""

    def __init__(self, paths: Mapping[str, str] | Iterable[str] | None) -> None:
        self._named = None if paths is None else _read(paths)
        #: What the path of a request that `kind_of` has to look at ends with.
        self.ends = (*_LAST, *(self._named or ()))
        self.missed = ""  # the first path that looks like inference and is not covered

    def kind_of(self, scope: Scope) -> RequestKind | None:
        """Return the kind of a covered POST; None for any other."""
        path: str = scope["path"]
        if self._named is None:
            return kind_of_end(path)
        kind = self._named.get(path.removeprefix(scope.get("root_path", "")))
        if kind is None and not self.missed and kind_of_end(path) is not None:
            self.missed = path[:200]
            log.warning("[kvcache] POST %s looks like inference but is not in `paths`: it passes without facts", path)
        return kind


def _read(paths: Mapping[str, str] | Iterable[str]) -> dict[str, RequestKind]:
    if isinstance(paths, str) or not isinstance(paths, Iterable):
        raise ConfigError([Problem("paths", "must be a list of paths, or a mapping of paths to kinds", f"[{paths!r}]")])
    given = dict(paths) if isinstance(paths, Mapping) else {path: kind_of_end(path) for path in paths}
    found = {}
    problems = []
    for path, kind in given.items():
        known = _KINDS.get(kind) if isinstance(kind, str) else kind
        if not str(path).startswith("/"):
            problems.append(Problem(f"paths.{path}", "must begin with /", f"/{path}"))
        elif known is None:
            problems.append(Problem(f"paths.{path}", "unknown kind", f"{{path: one of {', '.join(_KINDS)}}}"))
        else:
            found[path] = known
    if problems:
        raise ConfigError(problems)
    return found
