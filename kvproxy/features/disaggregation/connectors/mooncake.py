"""vLLM's MooncakeConnector: both legs at once, paired by a transfer id; the prefiller's engine id is asked for."""

from __future__ import annotations

from random import Random

import msgspec

from kvproxy.features.disaggregation.connectors.base import (
    Engine,
    Fetch,
    KvConnector,
    LegTerms,
    NoHandle,
    member_of,
    raw,
)

NAME = "kv_transfer_params"
_ID_BITS = 128


class _Rank(msgspec.Struct):
    engine_id: str


class MooncakeConnector(KvConnector):
    """Engine ids are those of processes: asked for again after each change of health."""

    at_once = True

    _decode = msgspec.json.Decoder(dict[str, _Rank]).decode

    def __init__(self, port: int, rng: Random) -> None:
        super().__init__(port, rng)
        self._ids: dict[Engine, dict[str, str]] = {}

    async def prepare(self, prefill: Engine, fetch: Fetch) -> None:
        """Ask for the engine id of each rank."""
        ranks = self._decode(await fetch(prefill, self.port, "/query"))
        self._ids[prefill] = {number: rank.engine_id for number, rank in ranks.items()}

    def forget(self, endpoint: Engine) -> None:
        self._ids.pop(endpoint, None)

    def begin(self, prefill: Engine) -> LegTerms:
        """Return a fresh transfer id for both, and where the decoder meets the prefiller."""
        engine_id = self._ids.get(prefill, {}).get(str(prefill.rank or 0))
        if engine_id is None:
            raise NoHandle("the engine id is not known yet")
        transfer_id = f"xfer-{self.rng.getrandbits(_ID_BITS):032x}"
        host = prefill.origin.host
        address = f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"
        asked = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
        pulled = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": transfer_id,
            "remote_bootstrap_addr": address,
            "remote_engine_id": engine_id,
        }
        return LegTerms({NAME: raw(asked)}, member_of(NAME, bytes(raw(pulled))))
