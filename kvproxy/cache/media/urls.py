"""The part of a medium's URL that names its content: the signature of cloud stores is left out. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

from kvproxy.cache.settings import URL_SIGNATURES

_MAX_URL_CHARACTERS = 16 * 1024


class UrlSignatures:
    """Names of the parameters that sign a URL; one that ends with `*` stands for all that begin so."""

    __slots__ = ("_begin", "_names")

    def __init__(self, names: Iterable[str] = URL_SIGNATURES) -> None:
        lowered = [name.lower() for name in names]
        self._names = frozenset(name for name in lowered if not name.endswith("*"))
        self._begin = tuple([name[:-1] for name in lowered if name.endswith("*")])

    def unsigned(self, url: str) -> str:
        """Return the URL without these parameters and its fragment; a URL that cannot be read stays as it is."""
        if len(url) > _MAX_URL_CHARACTERS or ("?" not in url and "#" not in url):
            return url
        try:
            parts = urlsplit(url)
        except ValueError:
            return url
        kept = [pair for pair in parts.query.split("&") if not self._signs(pair.partition("=")[0].lower())]
        return parts._replace(query="&".join(kept), fragment="").geturl()

    def _signs(self, name: str) -> bool:
        return name in self._names or (bool(self._begin) and name.startswith(self._begin))
