"""Whole apps on real loopback sockets, where streaming or disconnects matter."""

from __future__ import annotations

from kvproxy.proxy.listener.server import Server, serve

__all__ = ["Server", "serve"]
