"""Settings of KV events. Addresses at which older engines publish are the core's, which finds data-parallel ranks by
them."""

from __future__ import annotations

from typing import Literal

from kvproxy.base.settings.compose import part_of
from kvproxy.base.settings.feature_settings import FeatureSettings
from kvproxy.base.settings.model import Model
from kvproxy.cache.settings import KvCacheSettings

EventsMode = bool | Literal["auto"]


class KvEventsPlace(Model):
    """The `kvcache` filter."""

    kv_events: EventsMode = "auto"
    """Follow the KV events of engines that publish them (`--kv-events-config` of vLLM and SGLang). `auto`: of all that
    do, in clusters whose policy weighs cached prefixes; `true`: every engine is expected to publish, with a warning
    that names the others; `false`: none is followed."""


def find_mode(settings: KvCacheSettings) -> EventsMode:
    return part_of(settings, KvEventsPlace).kv_events


SETTINGS = FeatureSettings(fields={KvCacheSettings: (KvEventsPlace,)})
