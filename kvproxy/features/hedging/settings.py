"""Settings of hedging."""

from __future__ import annotations

from kvproxy.base.settings.model import Model


class HedgePlace(Model):
    """A cluster."""

    hedge: bool = False
    """Send a stream to a second endpoint once its first byte is later than expected by more than the prompt would cost
    there; the slower one is cancelled. Takes from the retry budget."""
