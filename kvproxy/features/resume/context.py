"""How many tokens a prompt and its answer may have together, by engine and model, as `/v1/models` lists it."""

from __future__ import annotations

import msgspec

from kvproxy.base.errors import UpstreamError
from kvproxy.cluster.endpoint import Endpoint
from kvproxy.features.resume.asked_once import AskedOnce

_PATH = b"/v1/models"


class _Row(msgspec.Struct):
    id: str = ""
    max_model_len: int | None = None


class _List(msgspec.Struct):
    data: list[_Row] = []


class ContextLengths(AskedOnce[int]):
    """Entered, it asks an engine at the first stream without a limit of its own."""

    def find(self, endpoint: Endpoint) -> int | None:
        """Return the length of the endpoint's models; None while it is unknown."""
        return self.look_up(str(endpoint.engine.id), self._ask(endpoint))

    async def _ask(self, endpoint: Endpoint) -> int | None:
        try:
            rows = msgspec.json.decode(await self.fetch(endpoint, b"GET", _PATH, b""), type=_List)
        except (UpstreamError, msgspec.DecodeError, UnicodeDecodeError):
            return None
        return min((row.max_model_len for row in rows.data if row.max_model_len), default=None)
