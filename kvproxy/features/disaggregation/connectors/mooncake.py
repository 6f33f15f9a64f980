"""vLLM's MooncakeConnector: both legs at once, paired by a transfer id; the prefiller's engine id is asked for."""

from __future__ import annotations

import msgspec

from kvproxy.features.disaggregation.connectors.base import (
    Engine,
    EngineFacts,
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

    async def prepare(self, prefill: Engine, fetch: Fetch, block_tokens: int) -> None:
        """Ask for the engine id of each rank."""
        ranks = self._decode(await fetch(prefill, self.port, "/query"))
        self.facts[prefill] = EngineFacts(ids={number: rank.engine_id for number, rank in ranks.items()})

    def begin(self, prefill: Engine) -> LegTerms:
        """Return a fresh transfer id for both, and where the decoder meets the prefiller."""
        engine_id = self.facts.get(prefill, EngineFacts()).ids.get(str(prefill.rank or 0))
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
