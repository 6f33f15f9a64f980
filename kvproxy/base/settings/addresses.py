"""Addresses: `host:port` as people write it, URLs of engines and helper services, and which are the proxy's own."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Mapping
from urllib.parse import SplitResult, urlsplit


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
_PATHS = ("/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/v1/embeddings", "/v1/models")


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
    if parts.path.rstrip("/").endswith(_PATHS):
        return "names one path of the engine: give only http://host:port, the paths come with the requests"
    return ""


def base_of_copied(url: str) -> str:
    """Return the engine's own address in what people copy from a client: without `/v1` and the paths below it."""
    url = url.rstrip("/")
    for end in _PATHS:
        url = url.removesuffix(end)
    return url.removesuffix("/v1").rstrip("/")


def same_origin(url: str) -> tuple[str, str, int, str]:
    """Return what makes two valid URLs the same engine: scheme, host, port, base path."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return parts.scheme, (parts.hostname or "").lower(), port, parts.path.rstrip("/")


_EVERY = frozenset({"0.0.0.0", "::"})


def listener_at(origin: tuple[str, str, int, str], listeners: Mapping[str, tuple[str, int]]) -> str:
    """Return the name of the listener (name: host and port) that answers at this origin, as `same_origin` gives it;
    else "".

    Names are not resolved, save for `localhost` and this machine's own.
    """
    _, host, port, _ = origin
    for name, (bound, own_port) in listeners.items():
        if own_port == port and _reaches(host, bound.casefold()):
            return name
    return ""


def _reaches(host: str, bound: str) -> bool:
    if bound in _EVERY:
        return _is_this_machine(host)
    if "localhost" in (host, bound):
        return is_loopback(host) and is_loopback(bound)
    return _canonical(host) == _canonical(bound)


def _canonical(host: str) -> str:
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host


def _is_this_machine(host: str) -> bool:
    if host in _EVERY or is_loopback(host) or host == socket.gethostname().casefold():
        return True
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))  # only an address of this machine can be bound
    except (ValueError, OSError):
        return False
    return True
