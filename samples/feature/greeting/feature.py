"""The feature, as kvproxy meets it: light, since every command loads it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvproxy.base.settings.compose import part_of
from kvproxy.base.settings.model import Model
from kvproxy.base.settings.paths import Finding, error_at
from kvproxy.operate.feature import Feature
from kvproxy.proxy.settings import ServingSettings

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from kvproxy.operate.config.schema import Config
    from kvproxy.proxy.filters.chain import FilterContext


class GreetingSettings(Model):
    """Settings of `greeting`."""

    header: str = "x-greeting"
    """Header of the answers."""


class GreetingPlace(Model):
    """The field that the root gets."""

    greeting: str = "hello"
    """Text of the header."""


class Greeting(Feature):
    """Greets clients."""

    name = "greeting"
    metric_group = "GreetingMetrics"
    settings = {ServingSettings: (GreetingPlace,)}
    filters = {"greeting": GreetingSettings}

    def verify(self, config: Config) -> Iterator[Finding]:
        """Check that the header holds one line of ASCII."""
        if not part_of(config, GreetingPlace).greeting.isascii():
            yield error_at(("greeting",), "must be ASCII")

    def build_filter(self, name: str, inner: ASGIApp, settings: Any, context: FilterContext) -> ASGIApp:
        """Return the filter around `inner`."""
        from greeting.filter import GreetingFilter

        return GreetingFilter(inner, settings, context)


FEATURE = Greeting()
