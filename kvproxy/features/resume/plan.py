"""Whether and how a broken stream goes on: a pure function of its request and of the part of the answer that came."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from kvproxy.base.types import RequestKind
from kvproxy.cache.clients.vllm import ChatForm
from kvproxy.features.resume.derendered import Came, DerenderedLeg
from kvproxy.features.resume.ids_leg import IdsLeg
from kvproxy.features.resume.progress import START, Mark, Progress
from kvproxy.features.resume.settings import Grade
from kvproxy.features.resume.text_leg import LEAST, IsSglang, TextLeg, less_kept
from kvproxy.proxy.request.continuation import Leg

#: Tokens that a greedy leg computes again, and characters where tokens are unknown: they must come out the same.
OVERLAP_TOKENS = 8
OVERLAP_CHARS = 24

_GUIDED = (
    "structured_outputs",
    "structural_tag",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "output_format",
)
#: Of responses and messages: a grammar is their `format`.
_SHAPES = ("text", "output_config")
_PENALTIES = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}
_LOGPROBS = ("logprobs", "top_logprobs", "prompt_logprobs", "logprob_token_ids")
_UNUSUAL = (
    "previous_response_id",
    "conversation",
    "background",
    "echo",
    "suffix",
    "use_beam_search",
    "prompt_embeds",
    "kv_transfer_params",
    "truncate_prompt_tokens",
)
#: Sampling of a chat that a request with token ids takes as well.
_SAMPLING = frozenset(
    {
        *("model", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "logit_bias"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos", "bad_words", "stream_options"),
        *("include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens", "allowed_token_ids"),
        *("user", "priority", "cache_salt", "session_id", "vllm_xargs", "request_id"),
    }
)
#: Content parts of other media than text.
_media = re.compile(
    rb'"(?:image|video|audio|input_audio|input_image|input_file|file)(?:_url|_embeds|_pil)?"\s*:'
).search
_MESSAGES = b"/messages"
#: Members of a message, and their names in its chat.
_OF_MESSAGES = {
    **{name: name for name in ("max_tokens", "temperature", "top_p", "top_k", "cache_salt", "vllm_xargs")},
    "stop_sequences": "stop",
}
_COMPLETION = b"/completions"
_CHAT_COMPLETION = b"/chat/completions"
_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_INVALID = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
#: Why ids alone cannot go on: the engine parses their text.
_PARSED = ("tools", "reasoning")
_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_DEFAULT_MAX_TOKENS = 16  # of text completions


class BrokenRequest(NamedTuple):
    """The request of a stream that broke, as its first engine got it."""

    kind: RequestKind
    target: bytes
    members: Mapping[str, msgspec.Raw]

    def value(self, name: str) -> Any:
        """Return a member's value; None if there is none, or one that cannot be read."""
        raw = self.members.get(name)
        try:
            return None if raw is None else msgspec.json.decode(raw)
        except _INVALID:
            return None

    @property
    def greedy(self) -> bool:
        """True if the same prompt always gets the same answer."""
        return bool(self.value("temperature") == 0 or self.value("top_k") == 1)

    @property
    def stop_chars(self) -> int:
        """Characters that the engine holds back, since they may begin a stop string that it takes out."""
        if self.value("include_stop_str_in_output"):
            return 0
        stop = self.value("stop") or self.value("stop_sequences")
        texts = [stop] if isinstance(stop, str) else stop if isinstance(stop, list) else []
        longest = max((len(text) for text in texts if isinstance(text, str)), default=0)
        return max(0, longest - 1)

    @property
    def max_tokens(self) -> int | None:
        """Limit of the answer."""
        if self.kind is RequestKind.COMPLETION:
            limit = self.value("max_tokens") if "max_tokens" in self.members else _DEFAULT_MAX_TOKENS
            return limit if isinstance(limit, int) else None
        limits = (self.value(name) for name in _LIMITS)
        return next((limit for limit in limits if isinstance(limit, int)), None)

    @property
    def counts(self) -> dict[str, int]:
        """Members that bound the length of the answer."""
        if self.kind is RequestKind.COMPLETION:
            bounds = {"max_tokens": self.max_tokens, LEAST: self.value(LEAST)}
        else:
            bounds = {name: self.value(name) for name in (*_LIMITS, LEAST)}
        return {name: count for name, count in bounds.items() if isinstance(count, int)}


class Plan(NamedTuple):
    """How the rest is requested: `grade` is exact, text or restart. The leg begins at `place` in the answer, so what is
    behind must come out the same first. `by_ids`: it goes on from token ids, and answers as a text completion unless
    the engine parses it (`parsed`)."""

    grade: str
    leg: Leg
    place: Mark
    by_ids: bool = False
    parsed: bool = False
    as_chat: bool = False  # of a message: the events are those of a chat
    limit: int | None = None  # of the whole answer

    @property
    def kept_tokens(self) -> int:
        """Tokens before `place`."""
        parts = self.leg.parts
        return parts.kept if isinstance(parts, TextLeg) else self.place.tokens

    @property
    def spent(self) -> bool:
        """True if no token is left behind `place`: the leg is for the end of the answer alone."""
        return self.limit is not None and self.kept_tokens >= self.limit


class Wishes(NamedTuple):
    """Settings of the route, and facts about the engines."""

    grade: Grade
    best_effort: bool = False
    context_tokens: int | None = None  # longest prompt and answer of the model together
    proven: bool = False  # the model was seen to continue half an answer of its own
    derenders: bool = False  # the engines make chunks of token ids, with tool calls and reasoning
    #: Make of a message the chat that SGLang (True) and other engines make of it.
    chat_forms: Mapping[bool, ChatForm] = {}
    is_sglang: IsSglang | None = None


def read_request(kind: RequestKind, target: bytes, body: bytes | None) -> BrokenRequest | None:
    """Return the request; None if it is not at hand as a JSON object."""
    try:
        return None if body is None else BrokenRequest(kind, target, _members.decode(body))
    except _INVALID:
        return None


def plan_leg(request: BrokenRequest, progress: Progress, wishes: Wishes) -> Plan | str:
    """Return the plan, or the reason why there is none, from a closed set."""
    if progress.obstacle or (request.value("n") or 1) != 1:
        return progress.obstacle or "n"
    if progress.empty and not (progress.ids_wanted and progress.ids):
        return Plan("restart", _repeat(request), START)
    obstacle = _find_obstacle(request, best_effort=wishes.best_effort)
    if obstacle:
        return obstacle
    exact = _why_not_exact(request, progress, wishes)
    if not exact:
        place = _place_by_tokens(request, progress)
        if place is not START or not progress.reasoned:
            return _plan_ids(request, progress, place, wishes)
        exact = "reasoning"
    if wishes.derenders and exact in _PARSED and request.kind is RequestKind.CHAT and not request.value("stop"):
        return _plan_parsed(request, progress)
    if wishes.grade is not Grade.TEXT:
        return exact
    return _why_not_text(request, progress, wishes) or _plan_text(request, progress, wishes)


def _find_obstacle(request: BrokenRequest, *, best_effort: bool) -> str:
    """Return why a request cannot be continued on any grade."""
    kind_of_format = request.value("response_format")
    if isinstance(kind_of_format, dict) and kind_of_format.get("type") != "text":
        return "guided"
    if any(request.value(name) is not None for name in _GUIDED):
        return "guided"
    shapes = [request.value(name) for name in _SHAPES]
    forms = [shape.get("format") for shape in shapes if isinstance(shape, dict)]
    if any(isinstance(form, dict) and form.get("type", "text") != "text" for form in forms):
        return "guided"
    choice = request.value("tool_choice")
    if choice == "required" or (isinstance(choice, dict) and choice.get("type") not in ("auto", "none")):
        return "guided"
    asked = [request.value(name) for name in _LOGPROBS]
    if any(asked) or (request.kind is RequestKind.COMPLETION and asked[0] == 0 and asked[0] is not False):
        return "logprobs"
    if request.value("include_reasoning") is False:  # which may have come unseen, without token ids
        return "reasoning"
    if any(request.value(name) for name in _UNUSUAL):
        return "unusual"
    if best_effort:
        return ""
    if any(request.value(name) not in (None, neutral) for name, neutral in _PENALTIES.items()):
        return "penalties"
    if not request.greedy:
        return "seed" if request.value("seed") is not None else "stop" if request.stop_chars else ""
    return ""


def _why_not_exact(request: BrokenRequest, progress: Progress, wishes: Wishes) -> str:
    """Return "" if the token ids can go on as they are."""
    if request.kind not in (RequestKind.CHAT, RequestKind.COMPLETION):
        return "api"
    if not (progress.prompt_ids and (progress.ids or progress.again) and progress.ids_known):
        return "no_ids"
    if _media(request.members.get("messages", b"")):
        return "media"
    if progress.tools or (request.value("tools") and request.value("tool_choice") != "none"):
        return "tools"
    if progress.thinking:
        return "reasoning"
    if not request.greedy and request.stop_chars:
        return "stop"  # the text that was held back is in the tokens
    return "" if _find_limit(request, progress, wishes) is not None else "max_tokens"


def _why_not_text(request: BrokenRequest, progress: Progress, wishes: Wishes) -> str:
    if progress.tools:
        return "tools"
    if progress.reasoned:
        return "reasoning"
    if progress.ids_wanted:
        return "no_ids"
    if request.kind is RequestKind.COMPLETION:
        return "" if isinstance(request.value("prompt"), str) else "no_text"
    if not progress.ids_known and request.max_tokens is not None and not wishes.best_effort:
        return "max_tokens"  # how many tokens came is unknown, as a chunk may have several
    if not request.greedy and not wishes.proven:
        return "unproven"  # of a greedy answer the words that come out the same are the proof
    return "prefilled" if request.value("continue_final_message") else ""


def _find_limit(request: BrokenRequest, progress: Progress, wishes: Wishes) -> int | None:
    """Return the limit of the whole answer; None if it is unknown."""
    if request.max_tokens is not None or wishes.context_tokens is None:
        return request.max_tokens
    return wishes.context_tokens - count_ids(progress.prompt_ids)


def count_ids(array: bytes) -> int:
    """Return the length of a JSON array of numbers."""
    return array.count(b",") + 1 if len(array) > 2 else 0


def _place_by_tokens(request: BrokenRequest, progress: Progress) -> Mark:
    """Return where a leg begins: what is behind is computed again. A sampled answer goes on behind its last text, and
    behind all its tokens if no more may come."""
    marks = progress.marks
    if not request.greedy:
        if request.max_tokens is not None and progress.tokens >= request.max_tokens:
            return Mark(progress.tokens, progress.chars)
        return marks[-1] if marks else START
    held = request.stop_chars
    for mark in reversed(marks):
        chars = mark.chars + held
        whole = mark.whole or progress.text[chars : chars + 1].isascii()  # no part of a character is before it
        if whole and progress.tokens - mark.tokens >= OVERLAP_TOKENS and chars < progress.chars - held:
            return Mark(mark.tokens, chars)
    return START


def _plan_ids(request: BrokenRequest, progress: Progress, place: Mark, wishes: Wishes) -> Plan | str:
    kept = msgspec.json.encode(progress.ids[: place.tokens])
    joined = progress.prompt_ids[:-1] + b"," + kept[1:] if place.tokens else progress.prompt_ids
    limit = _find_limit(request, progress, wishes)
    assert limit is not None
    if request.max_tokens is None and place.tokens >= limit:
        return "finished"  # the context is full: no engine takes another token
    if progress.ids_wanted and not request.greedy and place.tokens < progress.tokens:
        return "no_ids"  # the client has those of tokens that would be others
    target = request.target
    if request.kind is RequestKind.CHAT:
        target = target.replace(_CHAT_COMPLETION, _COMPLETION, 1)
        members = {name: raw for name, raw in request.members.items() if name in _SAMPLING}
    else:
        members = dict(request.members)
    bounds = {name: count for name, count in request.counts.items() if name == LEAST}
    members |= less_kept({"max_tokens": limit, **bounds}, place.tokens)
    members |= _raw(prompt=msgspec.Raw(joined), stream=True, return_token_ids=True)
    leg = Leg(target, msgspec.json.encode(members))
    if not (request.greedy or place.whole):
        leg = leg._replace(parts=IdsLeg(*leg[:2], request.value("model"), progress.ids[: place.tokens]))
    return Plan("exact", leg, place, by_ids=True, limit=limit)


def _plan_parsed(request: BrokenRequest, progress: Progress) -> Plan:
    """Return the plan for a chat with tool calls or reasoning, whose text ids alone would pass by."""
    ids = (*progress.ids, *progress.again)
    kept = min(progress.tokens, max(0, len(ids) - OVERLAP_TOKENS)) if request.greedy else len(ids)
    came = Came(progress.prompt_ids, ids, tuple(progress.ends), tuple(progress.call_ids), kept)
    body = msgspec.json.encode(request.members)
    leg = Leg(request.target, body, parts=DerenderedLeg(came, request.target, body))
    place = Mark(kept, progress.chars)
    return Plan("exact", leg, place, by_ids=True, parsed=True, limit=request.max_tokens)


def _repeat(request: BrokenRequest) -> Leg:
    """Return the request once more: nothing of its answer has come."""
    members = dict(request.members)
    if request.kind in (RequestKind.CHAT, RequestKind.COMPLETION):
        members |= _raw(return_token_ids=True)
    return Leg(request.target, msgspec.json.encode(members))


def _plan_text(request: BrokenRequest, progress: Progress, wishes: Wishes) -> Plan | str:
    place = _place_by_text(request, progress)
    if place is START:
        return Plan("text", _repeat(request), place)
    begun = progress.text[: place.chars]
    as_chat = request.kind is RequestKind.MESSAGES
    wholes = _make_chats(request, wishes.chat_forms) if as_chat else {False: request}
    bodies = {of: _continue_text(whole, begun, kept=place.tokens) for of, whole in wholes.items()}
    if not bodies:
        return "api"
    target = request.target.replace(_MESSAGES, _CHAT_COMPLETION, 1) if as_chat else request.target
    leg = Leg(target, next(iter(bodies.values())))
    counts = None if progress.ids_known else next(iter(wholes.values())).counts
    if as_chat or counts is not None:
        is_sglang = wishes.is_sglang if as_chat else None
        parts = TextLeg(target, bodies, begun, kept=place.tokens, counts=counts, is_sglang=is_sglang)
        leg = leg._replace(parts=parts)
    return Plan("text", leg, place, as_chat=as_chat, limit=request.max_tokens)


def _continue_text(request: BrokenRequest, begun: str, *, kept: int) -> bytes:
    members = {**request.members, **less_kept(request.counts, kept)}
    if request.kind is RequestKind.COMPLETION:
        members |= _raw(prompt=request.value("prompt") + begun)
    elif request.kind is RequestKind.RESPONSES:
        members["input"] = _with_item(members.get("input", msgspec.Raw(b'""')), begun)
    else:
        members["messages"] = _append(members["messages"], {"role": "assistant", "content": begun})
    if request.kind is RequestKind.CHAT:
        members |= _raw(continue_final_message=True, add_generation_prompt=False)
    return msgspec.json.encode(members)


def _make_chats(request: BrokenRequest, forms: Mapping[bool, ChatForm]) -> dict[bool, BrokenRequest]:
    """Return the chats that engines make of a message, none of which continues half a message, as far as chats are
    known to have the same prompt."""
    thinking = request.value("thinking")
    if isinstance(thinking, dict) and thinking.get("type") == "disabled":  # by the template
        return {}
    whole = msgspec.json.encode(request.members)
    members = {name: request.members[given] for given, name in _OF_MESSAGES.items() if given in request.members}
    if isinstance(choice := request.value("tool_choice"), dict):
        members |= _raw(tool_choice=choice.get("type"))
        if choice.get("disable_parallel_tool_use"):
            members |= _raw(parallel_tool_calls=False)
    members |= _raw(stream=True, stream_options={"include_usage": True})
    chats = {}
    for of, form in forms.items():
        with contextlib.suppress(ValueError):
            chat = _members.decode(form(whole)) | members
            chats[of] = request._replace(kind=RequestKind.CHAT, members=chat)
    return chats


def _append(array: msgspec.Raw, value: object) -> msgspec.Raw:
    items = bytes(array).strip()
    return msgspec.Raw(items[:-1] + (b"," if items[1:-1].strip() else b"") + msgspec.json.encode(value) + b"]")


def _with_item(given: msgspec.Raw, begun: str) -> msgspec.Raw:
    """Return the input of a response with half an answer behind it."""
    items = given
    if bytes(given).lstrip().startswith(b'"'):
        items = _append(msgspec.Raw(b"[]"), {"role": "user", "content": given})
    part = {"type": "output_text", "text": begun, "annotations": []}
    item = {"type": "message", "id": "msg_0", "role": "assistant", "status": "in_progress", "content": [part]}
    return _append(items, item)


def _place_by_text(request: BrokenRequest, progress: Progress) -> Mark:
    """Return the end of a whole word: of a greedy answer so far back that enough of it is computed again, of a sampled
    one its last text, without white space at the end."""
    text = progress.text
    if not request.greedy:
        chars = len(text.rstrip())
        return Mark(progress.tokens, chars) if chars else START
    enough = len(text) - max(OVERLAP_CHARS, request.stop_chars + 1)
    for mark in reversed(progress.marks):
        at = mark.chars
        if at <= enough and text[at : at + 1].isspace() and text[at - 1 : at].strip():
            return mark
    return START


def _raw(**values: object) -> dict[str, msgspec.Raw]:
    return {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in values.items()}
