"""How far claims that only one source makes have proved right, by endpoint.

A prefix this router itself sent to an endpoint, and that its capacity should still hold, is backed. One that only
events or a lookup service speak of is not: another router may have sent it there, or a removal was lost. Such a claim
counts for the share of it that earlier ones proved worth.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvproxy.types import EndpointId


@dataclass(slots=True)
class _Record:
    right: float = 0.0
    claims: float = 0.0


class Trust:
    """Starts with full trust, loses it within a few wrong claims, and regains it as they age.

    Every response counts towards ageing, so that an endpoint whose claims no request follows any more is tried again.
    """

    def __init__(self, *, prior_claims: float = 2.0, decay: float = 0.998, max_endpoints: int = 4096) -> None:
        self._prior_claims = prior_claims
        self._decay = decay
        self._max_endpoints = max_endpoints
        self._records: dict[EndpointId, _Record] = {}  # a dict: each decision reads one an endpoint

    def __contains__(self, endpoint: object) -> bool:
        """Whether an unbacked claim about it was ever put to the test."""
        return endpoint in self._records

    def share(self, endpoint: EndpointId) -> float:
        """Of an unbacked claim that is believed, 0 to 1."""
        record = self._records.get(endpoint)
        if record is None:
            return 1.0
        return (record.right + self._prior_claims) / (record.claims + self._prior_claims)

    def believed(self, endpoint: EndpointId, tokens: int, backed_tokens: int) -> int:
        """What a claim of `tokens` counts for, of which `backed_tokens` (or more) are backed."""
        unbacked = tokens - backed_tokens
        if unbacked <= 0 or endpoint not in self._records:
            return tokens
        return backed_tokens + int(self.share(endpoint) * unbacked)

    def observe(self, endpoint: EndpointId, tokens: int, backed_tokens: int, cached_tokens: int) -> None:
        """A response of that endpoint reported `cached_tokens`; its claim had been `tokens`, so many backed."""
        record = self._records.get(endpoint)
        unbacked = tokens - backed_tokens
        if record is None:
            if unbacked <= 0:
                return
            record = self._make(endpoint)
        record.right *= self._decay
        record.claims *= self._decay
        if unbacked > 0:
            record.right += min(1.0, max(0.0, (cached_tokens - backed_tokens) / unbacked))
            record.claims += 1.0

    def forget(self, endpoint: EndpointId) -> None:
        """The endpoint left."""
        self._records.pop(endpoint, None)

    def _make(self, endpoint: EndpointId) -> _Record:
        if len(self._records) >= self._max_endpoints:
            del self._records[next(iter(self._records))]
        record = self._records[endpoint] = _Record()
        return record
