"""kvproxy: a KV-cache-aware reverse proxy for LLM engines."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvproxy.app import Proxy
    from kvproxy.base.errors import ConfigError
    from kvproxy.embed.middleware import KVCacheMiddleware, choose, failed, matches, preferred, served
    from kvproxy.embed.no_endpoint import NoEndpoint
    from kvproxy.embed.router import PlacedRequest, Router
    from kvproxy.embed.transport import AsyncTransport, Transport

__all__ = [
    "AsyncTransport",
    "ConfigError",
    "KVCacheMiddleware",
    "NoEndpoint",
    "PlacedRequest",
    "Proxy",
    "Router",
    "Transport",
    "__version__",
    "choose",
    "failed",
    "matches",
    "preferred",
    "served",
]

__version__ = "0.1.0"

#: Imported on first use: `kvproxy --version` needs none of it.
_MODULES = {
    "AsyncTransport": "kvproxy.embed.transport",
    "ConfigError": "kvproxy.base.errors",
    "KVCacheMiddleware": "kvproxy.embed.middleware",
    "NoEndpoint": "kvproxy.embed.no_endpoint",
    "PlacedRequest": "kvproxy.embed.router",
    "Proxy": "kvproxy.app",
    "Router": "kvproxy.embed.router",
    "Transport": "kvproxy.embed.transport",
    "choose": "kvproxy.embed.middleware",
    "failed": "kvproxy.embed.middleware",
    "matches": "kvproxy.embed.middleware",
    "preferred": "kvproxy.embed.middleware",
    "served": "kvproxy.embed.middleware",
}


def __getattr__(name: str) -> object:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
