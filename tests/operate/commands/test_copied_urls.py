"""URLs that people copy from a client, made the address of an engine."""

from __future__ import annotations

import pytest

from kvproxy.base.settings.addresses import url_fault
from kvproxy.operate.commands.survey import base_of_copied


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
