"""The rest of a sampled answer behind a chunk of several tokens, of which the last may be a part of a character."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence

import msgspec

from kvproxy.base.upstream.response import UpstreamResponse
from kvproxy.cluster.pick import Pick
from kvproxy.features.resume.asked_part import fail_at_once, fetch_part
from kvproxy.features.resume.mismatch import Mismatch
from kvproxy.proxy.request.continuation import AsksEngines

_DETOKENIZE = b"/detokenize"
#: Last tokens that have the last character.
_TOKENS = 8
_HALF = "\N{REPLACEMENT CHARACTER}"


class _Text(msgspec.Struct):
    prompt: str


class IdsLeg:
    """The leg of one such answer: SplitsLeg. Behind half a character engines begin with the text of the prompt (vLLM
    0.32), or leave the character out: the engine is asked for the text of the last `ids` first."""

    def __init__(self, target: bytes, body: bytes, model: object, ids: Sequence[int]) -> None:
        self._target = target
        self._body = body
        self._asked = msgspec.json.encode({"model": model, "tokens": ids[-_TOKENS:]})

    def split(self, request: AsksEngines, pick: Pick) -> Coroutine[None, None, tuple[UpstreamResponse, int, bytes]]:
        """As of SplitsLeg."""
        return self._ask(request, pick)

    async def _ask(self, request: AsksEngines, pick: Pick) -> tuple[UpstreamResponse, int, bytes]:
        try:
            answer = await fetch_part(request, pick, _DETOKENIZE, self._asked, refusal="no_ids")
            if msgspec.json.decode(answer, type=_Text).prompt.endswith(_HALF):
                raise Mismatch("the answer broke within a character", refusal="no_ids")
        except Mismatch as error:
            return fail_at_once(error)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return fail_at_once(Mismatch("its text of tokens cannot be read", refusal="no_ids"))
        return await request.ask(pick, self._target, self._body)
