"""Origins: parsed strictly, equal when their connections may be shared."""

from __future__ import annotations

import ssl

import pytest

from kvproxy.base.tls.files import ClientTls
from kvproxy.base.upstream.origin import Origin


@pytest.mark.parametrize(
    ("url", "host", "port", "base_path", "host_header"),
    [
        ("http://engine:8000", "engine", 8000, b"", b"engine:8000"),
        ("http://engine", "engine", 80, b"", b"engine"),
        ("https://engine/", "engine", 443, b"", b"engine"),
        ("https://engine:8443/a/b/", "engine", 8443, b"/a/b", b"engine:8443"),
        ("http://[::1]:8000", "::1", 8000, b"", b"[::1]:8000"),
        ("HTTP://Engine:80", "engine", 80, b"", b"engine"),
    ],
)
def test_a_url_becomes_an_origin(url: str, host: str, port: int, base_path: bytes, host_header: bytes) -> None:
    """The default port is left out of the Host header, brackets belong to the text form only."""
    origin = Origin.parse(url)
    assert (origin.host, origin.port, origin.base_path, origin.host_header) == (host, port, base_path, host_header)


@pytest.mark.parametrize(
    "url",
    ["engine:8000", "ftp://engine", "http://", "http://user:secret@engine", "http://engine?x", "http://engine/#a",
     "http://engine:99999", "http://engine/ü", "http://engine/a b"],
)  # fmt: skip
def test_anything_else_is_refused(url: str) -> None:
    """No credentials, queries or fragments, no other scheme."""
    with pytest.raises(ValueError):
        Origin.parse(url)


def test_an_origin_of_another_scheme_is_refused() -> None:
    """Also when built by hand."""
    with pytest.raises(ValueError):
        Origin("ws", "engine", 1)


def test_equal_origins_share_one_entry() -> None:
    """The pool finds connections by origin; how a certificate is verified is part of it."""
    first, second = Origin.parse("https://e/x"), Origin.parse("https://e:443/x/")
    assert first == second
    assert hash(first) == hash(second)
    assert first != Origin.parse("https://e/x", tls=ClientTls(insecure=True))
    assert str(first) == "https://e/x"


def test_verification_is_on_unless_asked_otherwise() -> None:
    """The certificate and the name in it."""
    context = Origin.parse("https://e").tls.make_context()
    assert context.check_hostname
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert Origin.parse("https://e", tls=ClientTls(insecure=True)).tls.make_context().verify_mode is ssl.CERT_NONE
