"""ASGI apps below a path of another app."""

from __future__ import annotations

from urllib.parse import quote, unquote_to_bytes

from starlette.types import Scope


def may_be_below(scope: Scope) -> bool:
    """Return whether the app may be mounted below a root: cheap, and False for nearly all requests that are not."""
    raw_path = scope.get("raw_path")
    return bool(scope.get("root_path") or (raw_path and len(raw_path) != len(scope["path"])))


def without_root(scope: Scope) -> Scope:
    """Return the scope as the app's own: the root is a part of its path otherwise.

    Litestar takes its prefix off the path alone, to which it adds a slash; the prefix is found in the raw path then."""
    root: str = scope.get("root_path", "")
    path: str = scope["path"].removeprefix(root) or "/"
    below = {**scope, "root_path": "", "path": path}
    if raw := scope.get("raw_path"):
        whole = unquote_to_bytes(raw).decode("utf-8", "replace")
        end = path
        if path.endswith("/") and not whole.endswith("/"):
            end = path[:-1]
            below["path"] = end or "/"
        if whole.endswith(end):
            lost = whole[: len(whole) - len(end)]
            below["raw_path"] = raw.removeprefix(quote(lost).encode()) or b"/"
    return below
