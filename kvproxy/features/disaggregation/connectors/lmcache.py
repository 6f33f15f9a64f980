"""LMCache over a store that both engines read: no parameters. What the decoder does not find there it computes."""

from __future__ import annotations

from kvproxy.features.disaggregation.connectors.base import Engine, KvConnector, LegTerms


class LmcacheConnector(KvConnector):
    """The prefill leaves the prompt's KV in the store, in chunks of 256 tokens."""

    def begin(self, prefill: Engine) -> LegTerms:
        """Add nothing."""
        return LegTerms({})
