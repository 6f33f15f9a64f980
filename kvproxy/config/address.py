"""`host:port` as people write it, and whether a host is only reachable from this machine."""

from __future__ import annotations

import ipaddress


def split_address(text: str) -> tuple[str | None, int]:
    """Host and port of `host:port`, `[::1]:port`, `:port` (every interface) or `port` (host None: the default).

    Raises ValueError for anything else.
    """
    host, colon, port = text.strip().rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not port.isascii() or not port.isdigit() or int(port) > 65535 or (":" in host and not bracketed) or host == "[]":
        raise ValueError("expected host:port, :port, [ipv6]:port or a port number up to 65535")
    if not colon:
        return None, int(port)
    return (host.strip("[]") if host else "0.0.0.0"), int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a listener bound to `host`."""
    if host.casefold() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
