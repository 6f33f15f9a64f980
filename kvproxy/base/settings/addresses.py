"""Addresses: hosts, and URLs of engines and helper services."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import SplitResult, urlsplit


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach a listener bound to `host`."""
    if host.casefold() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_address(host: str) -> bool:
    """Return True for an IP address, False for a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


_HOST_AND_PORT = re.compile(r"([A-Za-z0-9][A-Za-z0-9.-]*|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}/?")
#: Path suffixes that people copy from a client instead of an engine's address.
API_PATHS = ("/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/v1/embeddings", "/v1/models")


def url_fault(url: str) -> str:
    """Return what is wrong with an `http(s)://host[:port][/base]` URL; empty when nothing is.

    It is quoted only where it is a bare `host:port`, since others may hold credentials.
    """
    if not url.isascii() or not url.isprintable() or " " in url:
        return "a URL holds no spaces, control or non-ASCII characters"
    if "://" not in url:
        meant = f" (did you mean http://{url}?)" if _HOST_AND_PORT.fullmatch(url) else ""
        return f"must start with http:// or https://{meant}"
    try:
        parts = urlsplit(url)
        return _parts_fault(parts, parts.port)
    except ValueError:
        return "not a valid URL: the port is a number up to 65535, an IPv6 address stands in [brackets]"


def _parts_fault(parts: SplitResult, port: int | None) -> str:
    if parts.scheme not in ("http", "https"):
        return "the scheme must be http or https"
    if "@" in parts.netloc:
        return "must not contain credentials, they would end up in logs: use `api_key`"
    if not parts.hostname:
        return "names no host"
    if port == 0 or parts.netloc.endswith(":"):
        return "the port must be between 1 and 65535"
    if parts.query or parts.fragment:
        return "must not contain a query or fragment"
    if parts.path.rstrip("/").endswith(API_PATHS):
        return "names one path of the engine: give only http://host:port, the paths come with the requests"
    return ""


def same_origin(url: str) -> tuple[str, str, int, str]:
    """Return what makes two valid URLs the same engine: scheme, host, port, base path."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return parts.scheme, (parts.hostname or "").lower(), port, parts.path.rstrip("/")
