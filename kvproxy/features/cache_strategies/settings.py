"""Settings of cache strategies."""

from __future__ import annotations

from kvproxy.base.settings.feature_settings import FeatureSettings

SETTINGS = FeatureSettings(strategies=("enable_pinning", "enable_compression", "enable_eviction"))
