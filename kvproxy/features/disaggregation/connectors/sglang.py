"""SGLang's bootstrap: both engines get the same body at once, with the room where they meet."""

from __future__ import annotations

import msgspec

from kvproxy.features.disaggregation.connectors.base import Engine, KvConnector, LegTerms, member_of, raw

#: Modes of the servers of both legs.
MODES = ("prefill", "decode")
_ROOM_BITS = 63


class ServerInfo(msgspec.Struct):
    """The part of `/server_info` that is read."""

    disaggregation_mode: str | None = None


class SglangConnector(KvConnector):
    """Servers started with `--disaggregation-mode prefill` and `decode`. They answer 400 to a request without a room,
    so that each goes in two legs."""

    at_once = True
    shortens = False
    counts_pulls = False
    has_modes = True
    computes_alone = False

    def begin(self, prefill: Engine) -> LegTerms:
        """Return a fresh room at the prefiller's bootstrap server, for both."""
        members = {
            "bootstrap_host": raw(prefill.origin.host),
            "bootstrap_port": raw(self.port),
            "bootstrap_room": raw(self.rng.getrandbits(_ROOM_BITS)),
        }
        return LegTerms(members, b"".join(member_of(name, bytes(value)) for name, value in members.items()))
