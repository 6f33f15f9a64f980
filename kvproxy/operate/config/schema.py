"""The native configuration as one typed, immutable model. Data only, without imports of components.

Every field's description is its documentation; `docs/configuration.md` and the JSON Schema are generated from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from pydantic import Field

from kvproxy.base.settings.model import Fraction, Model, Port, Secret, Size
from kvproxy.base.settings.paths import Path
from kvproxy.cache.settings import KvCacheSettings
from kvproxy.proxy.settings import ListenerSettings, ServingSettings

M = TypeVar("M")


class AdminSettings(Model):
    """The operator's listener: metrics, health, status. Never on the public one."""

    enabled: bool = True
    """Turn the admin listener off altogether."""
    host: str = "127.0.0.1"
    """Address to bind; anything but loopback requires `token`."""
    port: Port = 8889
    """TCP port; 0 takes a free one and prints it."""
    token: Secret | None = None
    """Bearer token every admin request must carry."""


class ReceiptSettings(Model):
    """Decision receipts: one JSON line a request, with what was known, what was decided and what happened."""

    retired = {"max_queue": "10,000 receipts may wait"}

    path: str = ""
    """File they are written to, one path for each proxy; empty: none are written."""
    sample: Fraction = 1.0
    """Share of the requests that get one."""
    prefixes: bool = True
    """Note keyed hashes of every prompt's prefixes (some 300 bytes a receipt), so that recorded traffic can be
    replayed: `kvproxy doctor --advise` needs them."""
    max_file: Size = 64 * 1024 * 1024
    """A file that is full becomes `path`.1, and so on."""
    max_files: int = Field(default=4, ge=1, le=1000)
    """Files kept, the present one included; the oldest goes first."""


class ReloadSettings(Model):
    """Reading the configuration file again while the proxy runs (SIGHUP and the admin listener always may)."""

    retired = {"interval": "the file is looked at every two seconds"}

    watch: bool = True
    """Apply the file when it changes. A bad file changes nothing; the errors are logged."""


class Config(ServingSettings):
    """A whole kvproxy configuration."""

    retired = {"profile": "profiles changed one timeout; for batch traffic write `timeouts: {first_byte: 1h}`"}

    listen: ListenerSettings = ListenerSettings()
    """The public listener. Also written as `host:port`."""
    admin: AdminSettings = AdminSettings()
    """The operator's listener."""
    reload: ReloadSettings = ReloadSettings()
    """Hot reload."""
    receipts: ReceiptSettings = ReceiptSettings()
    """Decision receipts, for `kvproxy explain` and `kvproxy replay --receipts`; off unless they have a path."""


def find_filters(config: Config, kind: type[M]) -> Iterator[tuple[Path, M]]:
    """Yield the settings of this kind with their place, for `verify`."""
    for index, spec in enumerate(config.filters):
        if isinstance(spec.settings, kind):
            yield ("filters", index), spec.settings


def find_kvcache_settings(config: Config) -> KvCacheSettings | None:
    """Return the settings of the kvcache filter; None when the chain has none, or it is switched off."""
    if not config.filters:
        return KvCacheSettings()
    for spec in config.filters:
        if spec.name == "kvcache":
            settings = spec.settings if isinstance(spec.settings, KvCacheSettings) else KvCacheSettings()
            return settings if settings.enabled else None
    return None
