"""Setting of the shadow policy."""

from __future__ import annotations

from kvproxy.base.settings.model import Model
from kvproxy.cluster.settings import PolicyName


class ShadowPlace(Model):
    """The key that each cluster gets."""

    shadow_policy: PolicyName | None = None
    """A second policy that decides on the same traffic without effect; how it differs is counted. Empty: none."""
