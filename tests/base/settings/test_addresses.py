"""URLs of engines."""

from __future__ import annotations

from kvproxy.base.settings.addresses import same_origin


def test_a_port_that_is_not_written_is_that_of_the_scheme() -> None:
    """Two ways to write one engine."""
    assert same_origin("https://H/") == same_origin("https://h:443")
    assert same_origin("http://h") == same_origin("http://h:80/")
    assert same_origin("https://h") != same_origin("http://h")
