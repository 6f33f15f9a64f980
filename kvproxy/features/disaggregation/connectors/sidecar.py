"""llm-d's routing sidecar in front of the decoder, which sends the prefill leg itself, to where a header says."""

from __future__ import annotations

from kvproxy.features.disaggregation.connectors.base import Engine, KvConnector, LegTerms

FIELD = b"x-prefiller-host-port"


class SidecarConnector(KvConnector):
    """One request from here; the sidecar returns a failed prefill as the answer, which is then asked for again without
    the header."""

    sends_prefill = False

    def begin(self, prefill: Engine) -> LegTerms:
        """Name the prefiller."""
        host = prefill.origin.host
        place = f"[{host}]:{prefill.origin.port}" if ":" in host else f"{host}:{prefill.origin.port}"
        return LegTerms({}, fields=[(FIELD, place.encode())])
