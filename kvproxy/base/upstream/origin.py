"""Where an engine listens: scheme, host, port and base path, with what is needed to speak to it."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from kvproxy.base.tls.files import ClientTls

_DEFAULT_PORTS = {"http": 80, "https": 443}
_PLAIN = ClientTls()


@dataclass(frozen=True)
class Origin:
    """One engine's address. Equal origins share connections, so everything that shapes a connection is part of it.

    `host` has no brackets (IPv6 included); `base_path` goes before every request target and has no trailing slash.
    `tls` counts for https alone. `server_name` is the name expected to answer at an address: its certificate is
    verified for it, and it is sent in the Host header."""

    scheme: str
    host: str
    port: int
    base_path: bytes = b""
    tls: ClientTls = _PLAIN
    server_name: str = ""
    host_header: bytes = field(init=False, repr=False, compare=False)
    #: Equal for equal origins. A dictionary of these costs a request less than one of origins, whose hash is Python's.
    key: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.scheme not in _DEFAULT_PORTS:
            raise ValueError(f"scheme is http or https, not {self.scheme!r}")
        host = self.server_name or self.host
        name = f"[{host}]" if ":" in host else host
        authority = name if self.port == _DEFAULT_PORTS[self.scheme] else f"{name}:{self.port}"
        # Set once here, since both are read for every request.
        object.__setattr__(self, "host_header", authority.encode("idna" if not authority.isascii() else "ascii"))
        identity = (self.scheme, self.host, self.port, self.base_path, self.tls, self.server_name)
        object.__setattr__(self, "key", repr(identity))

    @classmethod
    def parse(cls, url: str, *, tls: ClientTls = _PLAIN, server_name: str = "") -> Origin:
        """Return the origin of `http(s)://host[:port][/base/path]`; ValueError for any other form."""
        parts = urlsplit(url)
        if parts.scheme not in _DEFAULT_PORTS:
            raise ValueError(f"expected http://... or https://..., not {url!r}")
        if not parts.hostname:
            raise ValueError(f"no host in {url!r}")
        if parts.username is not None or parts.password is not None:
            raise ValueError("no credentials in the URL of an endpoint")
        if parts.query or parts.fragment:
            raise ValueError(f"no query or fragment in the URL of an endpoint: {url!r}")
        path = parts.path.rstrip("/")
        if not path.isascii() or not path.isprintable() or " " in path:
            raise ValueError(f"the base path must be percent-encoded: {url!r}")
        port = parts.port if parts.port is not None else _DEFAULT_PORTS[parts.scheme]
        return cls(parts.scheme, parts.hostname, port, path.encode("ascii"), tls, server_name)

    def __str__(self) -> str:
        if self.server_name:
            return f"{self.scheme}://{self.host}:{self.port}{self.base_path.decode('ascii')}"
        return f"{self.scheme}://{self.host_header.decode('ascii')}{self.base_path.decode('ascii')}"


def public_location(location: bytes, origin: Origin | None) -> bytes:
    """Where a redirect of the engine at `origin` leads, for clients: relative ones and those to public hosts stay."""
    try:
        parts = urlsplit(location.decode("latin-1"))
        host = parts.hostname or ""
    except ValueError:
        return b"/"
    if not parts.netloc or not (
        _is_internal(host) or (origin is not None and host in (origin.host.lower(), origin.server_name.lower()))
    ):
        return location
    path = parts.path or "/"
    base = "" if origin is None else origin.base_path.decode("ascii")
    if base and (path + "/").startswith(base + "/"):
        path = path[len(base) :] or "/"
    return (f"/{path.lstrip('/')}" + (f"?{parts.query}" if parts.query else "")).encode("latin-1")


def _is_internal(host: str) -> bool:
    try:
        return host == "localhost" or not ipaddress.ip_address(host).is_global
    except ValueError:
        return False
