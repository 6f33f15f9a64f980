"""Note of transfers in receipts."""

from __future__ import annotations

import msgspec

from kvproxy.base.types import EndpointId

#: Its name.
NOTE = "transfer"


#: Of a transfer that is not over.
UNDER_WAY = "under_way"


class TransferResult(msgspec.Struct, omit_defaults=True):
    """KV was to be copied to an endpoint for the request, before it went there."""

    endpoint: EndpointId
    source: str  # an endpoint, or `shared`
    tokens: int  # that were expected there
    #: done, late (the request went first), left (its client did, or its endpoint became unhealthy), no_effect, timeout,
    #: ... as for actions
    result: str = UNDER_WAY
    moved: int = 0
    waited_s: float = 0.0  # by the request, for the copy alone
