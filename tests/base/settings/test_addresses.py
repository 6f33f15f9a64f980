"""URLs that people copy from a client, made the address of an engine."""

from __future__ import annotations

import pytest

from kvproxy.base.settings.addresses import base_of_copied, same_origin, url_fault


@pytest.mark.parametrize(
    "copied",
    [
        "http://h:8000",
        "http://h:8000/",
        "http://h:8000/v1",
        "http://h:8000/v1/",
        "http://h:8000/v1/chat/completions",
        "http://h:8000/v1/models",
        "http://h:8000/v1/messages/",
    ],
)
def test_the_base_of_a_copied_url(copied: str) -> None:
    """Without the paths that come with requests, and a good URL of an engine then."""
    assert base_of_copied(copied) == "http://h:8000"
    assert url_fault(base_of_copied(copied)) == ""


def test_a_base_path_of_the_engines_own_stays() -> None:
    """A gateway may serve an engine below a path."""
    assert base_of_copied("http://h/engines/a/v1/") == "http://h/engines/a"


def test_a_port_that_is_not_written_is_that_of_the_scheme() -> None:
    """Two ways to write one engine."""
    assert same_origin("https://H/") == same_origin("https://h:443")
    assert same_origin("http://h") == same_origin("http://h:80/")
    assert same_origin("https://h") != same_origin("http://h")
