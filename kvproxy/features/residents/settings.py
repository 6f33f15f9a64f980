"""Settings of sessions admitted by memory."""

from __future__ import annotations

from kvproxy.base.settings.feature_settings import FeatureSettings
from kvproxy.base.settings.model import Model
from kvproxy.cluster.settings import ClusterSettings


class SessionsPlace(Model):
    """A cluster."""

    admit_sessions: bool = True
    """Begin a session of many turns, such as an agent's, only where an engine's memory has room for it beside those
    that run there; until then its first turn waits in the router queue. No effect while all of them fit, or where the
    engines do not report their memory."""


SETTINGS = FeatureSettings(fields={ClusterSettings: (SessionsPlace,)})
