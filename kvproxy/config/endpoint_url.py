"""What an engine's or a helper service's URL may look like."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit

#: Ends of what people copy from a client instead of an engine's address.
_PATHS = ("/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/v1/embeddings", "/v1/models")


def url_fault(url: str) -> str:
    """What is wrong with an `http(s)://host[:port][/base]` URL; empty when nothing is. Never quotes it."""
    if not url.isascii() or not url.isprintable() or " " in url:
        return "a URL holds no spaces, control or non-ASCII characters"
    if "://" not in url:
        return "must start with http:// or https://"
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
    """The engine's own address in what people copy from a client: without `/v1` and the paths below it."""
    url = url.rstrip("/")
    for end in _PATHS:
        url = url.removesuffix(end)
    return url.removesuffix("/v1").rstrip("/")


def same_origin(url: str) -> tuple[str, str, int, str]:
    """What makes two valid URLs the same engine: scheme, host, port, base path."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return parts.scheme, (parts.hostname or "").lower(), port, parts.path.rstrip("/")
