"""Settings of the sample: a filter's own, and a field of the root."""

from __future__ import annotations

from kvproxy.base.settings.model import Model


class GreetingSettings(Model):
    """Settings of `greeting`."""

    header: str = "x-greeting"
    """Header of the answers."""


class GreetingPlace(Model):
    """The field that the root gets."""

    greeting: str = "hello"
    """Text of the header."""
