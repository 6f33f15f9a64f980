"""Settings of the sample: the one module of a feature that reading a configuration loads."""

from __future__ import annotations

from collections.abc import Iterator

from kvproxy.base.settings.compose import part_of
from kvproxy.base.settings.feature_settings import AddedFilter, FeatureSettings
from kvproxy.base.settings.model import Model
from kvproxy.base.settings.paths import Finding, error_at
from kvproxy.operate.config.schema import Config
from kvproxy.proxy.settings import ServingSettings


class GreetingSettings(Model):
    """Settings of the filter `greeting`."""

    header: str = "x-greeting"
    """Header of the answers."""


class GreetingPlace(Model):
    """The field that the root gets."""

    greeting: str = "hello"
    """Text of the header."""


def verify(config: Config) -> Iterator[Finding]:
    """Check that the header holds one line of ASCII."""
    if not part_of(config, GreetingPlace).greeting.isascii():
        yield error_at(("greeting",), "must be ASCII")


SETTINGS = FeatureSettings(
    fields={ServingSettings: (GreetingPlace,)}, filters={"greeting": AddedFilter(GreetingSettings)}, verify=verify
)
