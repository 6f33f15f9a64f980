"""ASGI apps below a path of another app."""

from __future__ import annotations

from urllib.parse import quote

from starlette.types import Scope


def without_root(scope: Scope) -> Scope:
    """Return the scope as the app's own: the root is a part of its path otherwise."""
    root: str = scope["root_path"]
    below = {**scope, "root_path": "", "path": scope["path"].removeprefix(root) or "/"}
    if scope.get("raw_path"):
        below["raw_path"] = scope["raw_path"].removeprefix(quote(root).encode()) or b"/"
    return below
