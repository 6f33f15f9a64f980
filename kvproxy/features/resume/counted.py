"""The rest of an answer with a limit, whose tokens no engine has reported: one counts those of its text first."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence

import msgspec

from kvproxy.base.upstream.response import UpstreamResponse
from kvproxy.cluster.pick import Pick
from kvproxy.features.resume.asked_part import PartFailed, fetch_part
from kvproxy.features.resume.mismatch import Mismatch
from kvproxy.proxy.request.continuation import AsksEngines, Leg

Answer = tuple[UpstreamResponse, int, bytes]
_TOKENIZE = b"/tokenize"
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class _Counted(msgspec.Struct):
    count: int


class CountedLeg:
    """The leg of one such answer: SplitsLeg. It goes on behind `text`, which has `kept` tokens: as many as events,
    until the engine has counted them. Members named `limits` allow `limit` tokens in all."""

    def __init__(self, leg: Leg, text: str, *, kept: int, limits: Sequence[str], limit: int) -> None:
        self.kept = kept
        self._leg = leg
        self._text = text
        self._limits = limits
        self._limit = limit

    def split(self, request: AsksEngines, pick: Pick) -> Coroutine[None, None, Answer]:
        """As of SplitsLeg."""
        return self._ask(request, pick)

    async def _ask(self, request: AsksEngines, pick: Pick) -> Answer:
        members = _members(self._leg.body)
        asked: dict[str, object] = {"prompt": self._text, "add_special_tokens": False}
        if "model" in members:
            asked["model"] = members["model"]
        try:
            counted = await fetch_part(request, pick, _TOKENIZE, msgspec.json.encode(asked), refusal="max_tokens")
            self.kept = msgspec.json.decode(counted, type=_Counted).count
        except (Mismatch, PartFailed, *_UNREADABLE):
            pass  # an engine or a gateway without this route: the events are all there is
        left = msgspec.Raw(msgspec.json.encode(max(1, self._limit - self.kept)))
        return await request.ask(
            pick, self._leg.target, msgspec.json.encode(members | dict.fromkeys(self._limits, left))
        )
