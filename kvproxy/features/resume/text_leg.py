"""The rest of an answer that goes on by its text: what its request depends on is found at the engine that goes on."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping

import msgspec

from kvproxy.base.errors import ClientError
from kvproxy.base.upstream.response import UpstreamResponse
from kvproxy.cluster.pick import Pick
from kvproxy.features.resume.asked_part import PartFailed, fail_at_once, fetch_part
from kvproxy.features.resume.mismatch import Mismatch
from kvproxy.proxy.request.continuation import AsksEngines

Answer = tuple[UpstreamResponse, int, bytes]
#: Finds whether an engine is SGLang. Raises ClientError.
IsSglang = Callable[[Pick], Awaitable[bool]]
#: Member with the least tokens of an answer.
LEAST = "min_tokens"
_TOKENIZE = b"/tokenize"
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class _Counted(msgspec.Struct):
    count: int


def less_kept(counts: Mapping[str, int], kept: int) -> dict[str, msgspec.Raw]:
    """Return the members that bound the length of an answer, less the tokens that are kept of it. Engines generate one
    token at least: where none is left, one is requested for the answer's end alone, and must not end it otherwise."""
    left = {name: max(0, count - kept) for name, count in counts.items()}
    if any(not count for name, count in left.items() if name != LEAST):
        left = {**dict.fromkeys(left, 1), LEAST: 1}
    return {name: msgspec.Raw(b"%d" % count) for name, count in left.items()}


class TextLeg:
    """The leg of one such answer: SplitsLeg. It goes on behind `text`, which has `kept` tokens: as many as events came,
    until the engine has counted them; `counts`, members for the whole answer, are then less by them. None: they are
    known. `bodies` are those for SGLang (True) and for other engines; without `is_sglang` there is one for all."""

    def __init__(
        self,
        target: bytes,
        bodies: Mapping[bool, bytes],
        text: str,
        *,
        kept: int,
        counts: Mapping[str, int] | None,
        is_sglang: IsSglang | None,
    ) -> None:
        self.kept = kept
        self._target = target
        self._bodies = bodies
        self._text = text
        self._counts = counts
        self._is_sglang = is_sglang

    def split(self, request: AsksEngines, pick: Pick) -> Coroutine[None, None, Answer]:
        """As of SplitsLeg."""
        return self._ask(request, pick)

    async def _ask(self, request: AsksEngines, pick: Pick) -> Answer:
        try:
            body = self._bodies[self._is_sglang is not None and await self._is_sglang(pick)]
        except (ClientError, KeyError):
            return fail_at_once(Mismatch("no chat is known to have the message's prompt there", refusal="api"))
        if self._counts is not None:
            members = _members(body)
            await self._count(request, pick, members)
            body = msgspec.json.encode(members | less_kept(self._counts, self.kept))
        return await request.ask(pick, self._target, body)

    async def _count(self, request: AsksEngines, pick: Pick, members: Mapping[str, msgspec.Raw]) -> None:
        asked: dict[str, object] = {"prompt": self._text, "add_special_tokens": False}
        if "model" in members:
            asked["model"] = members["model"]
        try:
            counted = await fetch_part(request, pick, _TOKENIZE, msgspec.json.encode(asked), refusal="max_tokens")
            self.kept = msgspec.json.decode(counted, type=_Counted).count
        except (Mismatch, PartFailed, *_UNREADABLE):
            pass  # an engine or a gateway without this route: the events are all there is
