"""Keys of Redis or Valkey with a time to live: claims of actions, and the state that is kept for a restart."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from kvproxy.features.exchange.wire import Origin

log = logging.getLogger("kvproxy.sync")

#: Until a call counts as failed.
_TIMEOUT_S = 3.0
#: Bound on a value read from the store; a longer one is not ours.
MAX_RECALLED_BYTES = 4 * 1024 * 1024

#: The holder of the key may renew it; otherwise it is free after its TTL. A value of another type or without a TTL is
#: no claim and is replaced.
_CLAIM = """
local kind = redis.call('TYPE', KEYS[1]).ok
local holder = kind == 'string' and redis.call('GET', KEYS[1])
if not holder or holder == ARGV[1] or redis.call('PTTL', KEYS[1]) == -1 then
  return redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2]) and 1
end
return 0
"""


class RedisKeys:
    """Those of one topic; `client` is connected."""

    def __init__(self, topic: str, client: Any) -> None:
        self._topic = topic
        self._client = client

    async def keep(self, payload: bytes, ttl_s: float) -> None:
        """As of StoreKeys."""
        async with asyncio.timeout(_TIMEOUT_S):
            await self._client.set(f"{self._topic}.kept", payload, px=int(1000 * ttl_s))

    async def recall(self, ttl_s: float) -> tuple[bytes, float]:
        """As of StoreKeys."""
        from redis.exceptions import ResponseError

        pipeline = self._client.pipeline()
        key = f"{self._topic}.kept"
        pipeline.getrange(key, 0, MAX_RECALLED_BYTES).pttl(key)
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                payload, left_ms = await pipeline.execute()
        except ResponseError:  # of another type: it is written anew
            return b"", 0.0
        return payload or b"", max(0.0, ttl_s - left_ms / 1000)

    async def claim(self, what: str, ttl_s: float, holder: Origin) -> bool:
        """As of StoreKeys."""
        key = f"{self._topic}.claim.{what}"
        name = f"{holder} {holder.epoch}"
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return bool(await self._client.eval(_CLAIM, 1, key, name, int(1000 * ttl_s) or 1))
        except Exception as error:  # noqa: BLE001 - of a library
            log.warning("the store grants no claim (%s)", type(error).__name__)
            return False
