"""Where an engine listens: scheme, host, port and base path, with what is needed to speak to it."""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass, field
from functools import cached_property
from urllib.parse import urlsplit

_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Origin:
    """One engine's address. Equal origins share connections, so everything that shapes a connection is part of it.

    `host` has no brackets (IPv6 included); `base_path` goes before every request target and has no trailing slash.
    `server_name` is the name expected to answer at an address: its certificate is verified for it, and the Host header
    says it.
    """

    scheme: str
    host: str
    port: int
    base_path: bytes = b""
    ca_file: str = ""
    insecure: bool = False
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
        identity = (self.scheme, self.host, self.port, self.base_path, self.ca_file, self.insecure, self.server_name)
        object.__setattr__(self, "key", repr(identity))

    @classmethod
    def parse(cls, url: str, *, ca_file: str = "", insecure: bool = False, server_name: str = "") -> Origin:
        """Return the origin of `http(s)://host[:port][/base/path]`; ValueError for anything that says more or less."""
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
        return cls(parts.scheme, parts.hostname, port, path.encode("ascii"), ca_file, insecure, server_name)

    @cached_property
    def ssl_context(self) -> ssl.SSLContext | None:
        """Made once, None for http. Certificate and host name are verified unless `insecure`."""
        if self.scheme == "http":
            return None
        context = ssl.create_default_context(cafile=self.ca_file or None)
        context.set_alpn_protocols(["http/1.1"])
        if self.insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context

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
