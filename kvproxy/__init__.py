"""kvproxy: a KV-cache-aware reverse proxy for LLM engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvproxy.proxy.filters.middleware import KVCacheMiddleware, choose, preferred, served

__all__ = ["KVCacheMiddleware", "__version__", "choose", "preferred", "served"]

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """The middleware is imported on first use: `kvproxy --version` needs none of it."""
    if name in ("KVCacheMiddleware", "choose", "preferred", "served"):
        from kvproxy.proxy.filters import middleware

        return getattr(middleware, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
