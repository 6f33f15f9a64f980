"""The fields of each API's body that the proxy reads, and the session they name. Null counts as absent."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import msgspec
from msgspec import Raw

from kvproxy.base.types import RequestHints
from kvproxy.cache.prefix.cache_marks import DEFAULT_TTL_S
from kvproxy.proxy.request.session import Session, bounded_key, child_session, session_of_user

NO_RAW = Raw()
_Key = str | int | None
_COMMON = ("session_id", "user", "prompt_cache_key", "vllm_xargs", "nvext")
_KEEPING = ("prompt_cache_retention", "prompt_cache_options", "cache_control")
#: Fields, of any kind of body, that may name a session or a cache group, or set how long prompts are kept.
NAMING = (*_COMMON, *_KEEPING, "client_metadata", "conversation", "metadata")
#: Name of the agent that a task begins with, in the contract of vLLM's router.
_LEAD = "lead"
#: An answer that is expected to be longer counts as this long.
_MAX_OUTPUT_TOKENS = 131_072.0
_MAX_PROGRAM_BYTES = 16_384
#: Meaning of "in_memory": OpenAI keeps such a prompt for 5 to 10 minutes after its last use.
_IN_MEMORY_S = 300.0
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_request_id = re.compile("[!-~]{1,128}").fullmatch
_duration = re.compile(r"(\d{1,6})([smhd])").fullmatch


def is_request_id(text: str) -> bool:
    """Return True for 1 to 128 visible ASCII characters, which a header field may carry."""
    return _request_id(text) is not None


_Number = int | float | str | None


class _Program(msgspec.Struct, gc=False):
    program_id: _Key = None
    task_id: _Key = None
    session_id: _Key = None
    agent_id: _Key = None
    parent_program_id: _Key = None
    parent_agent_id: _Key = None
    priority: _Number = None
    deadline_seconds: _Number = None
    expected_output_length: _Number = None

    def session(self) -> Session | None:
        """Return the program, by its id or as an agent of its task."""
        program, task, agent, parent = map(
            _word, (self.program_id, self.task_id or self.session_id, self.agent_id, self.parent_program_id)
        )
        if program or not task:
            return _named(program, parent)
        agent = agent.removeprefix(f"{task}:") or _LEAD
        if not parent and (agent != _LEAD or self.parent_agent_id):
            parent = f"{task}:{_word(self.parent_agent_id).removeprefix(f'{task}:') or _LEAD}"
        return _named(f"{task}:{agent}", parent)

    def hints(self) -> RequestHints | None:
        """Return what it expects of this request."""
        return _hints(self.priority, self.deadline_seconds, self.expected_output_length)


_decode_program = msgspec.json.Decoder(_Program, strict=False).decode


class _Xargs(msgspec.Struct, gc=False):
    session_id: _Key = None
    agentic_context: _Program | str | None = None

    def program(self) -> _Program | None:
        """Return the program, which is an object or its JSON as a text, as vLLM itself takes it."""
        said = self.agentic_context
        if isinstance(said, str):
            try:
                return _decode_program(said) if len(said) <= _MAX_PROGRAM_BYTES else None
            except (msgspec.DecodeError, RecursionError, UnicodeError):
                return None
        return said


class _AgentContext(msgspec.Struct, gc=False):
    session_id: _Key = None
    parent_session_id: _Key = None


class _AgentHints(msgspec.Struct, gc=False):
    priority: _Number = None
    osl: _Number = None


class _Nvext(msgspec.Struct, gc=False):
    agent_context: _AgentContext | None = None
    agent_hints: _AgentHints | None = None


class _ClientMetadata(msgspec.Struct, gc=False):
    """Codex's metadata in a body."""

    thread_id: _Key = None
    session_id: _Key = None
    parent: _Key = msgspec.field(name="x-codex-parent-thread-id", default=None)

    def session(self) -> Session | None:
        """Return the session it names."""
        own = _word(self.session_id)
        return _named(_word(self.thread_id) or own, _word(self.parent) or own)


class _Kept(msgspec.Struct, gc=False):
    ttl: _Key = None


class _SessionFields(msgspec.Struct, gc=False):
    """Fields of a body that name a session, whatever its API."""

    session_id: _Key = None
    user: _Key = None
    prompt_cache_key: _Key = None
    prompt_cache_retention: _Key = None
    prompt_cache_options: _Kept | None = None
    vllm_xargs: _Xargs | None = None
    nvext: _Nvext | None = None

    def session(self) -> Session | None:
        """By the first of them that names one."""
        return (
            _named(self.session_id)
            or (self.vllm_xargs and _session_of_xargs(self.vllm_xargs))
            or (self.nvext and _session_of_nvext(self.nvext))
            or self.own_session()
            or _session_of_user(self.end_user())
        )

    def hints(self) -> RequestHints | None:
        """Return what the client expects of the request; None: nothing is stated."""
        if program := self.vllm_xargs and self.vllm_xargs.program():
            return program.hints()
        said = self.nvext and self.nvext.agent_hints
        return _hints(said.priority, None, said.osl) if said else None

    def own_session(self) -> Session | None:
        """By fields that only this API has."""
        return None

    def end_user(self) -> _Key:
        """Return the end user the client speaks for."""
        return self.user

    def cache_group(self) -> str | None:
        """Return the requests that the client expects to share prefixes."""
        return bounded_key(_word(self.prompt_cache_key)) or None

    def retention_s(self) -> float | None:
        """How long the client asks for its whole prompt to be kept after the answer."""
        options = self.prompt_cache_options
        return _seconds(self.prompt_cache_retention) or (None if options is None else _seconds(options.ttl))


def _seconds(said: _Key) -> float | None:
    text = _word(said)[:16]
    if text.replace("-", "_") == "in_memory":
        return _IN_MEMORY_S
    found = _duration(text)
    return None if found is None else int(found[1]) * _UNITS_S[found[2]] or None


def _hints(priority: _Number, deadline_s: _Number, output_tokens: _Number) -> RequestHints | None:
    """Return what these state within bounds; None: nothing."""
    level, deadline, tokens = map(_number, (priority, deadline_s, output_tokens))
    if level is deadline is tokens is None:
        return None
    return RequestHints(
        int(level or 0.0),
        None if deadline is None else max(0.0, deadline),
        int(max(0.0, min(_MAX_OUTPUT_TOKENS, tokens or 0.0))),
    )


def _number(said: _Number) -> float | None:
    try:
        number = math.nan if said is None else float(said)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _session_of_xargs(xargs: _Xargs) -> Session | None:
    if session := _named(xargs.session_id):
        return session
    program = xargs.program()
    return None if program is None else program.session()


def _session_of_nvext(nvext: _Nvext) -> Session | None:
    context = nvext.agent_context
    return None if context is None else _named(context.session_id, context.parent_session_id)


def _session_of_user(user: _Key) -> Session | None:
    named = _named(user)
    return None if named is None else named._replace(of_user=True)


def _named(root: _Key, parent: _Key = None) -> Session | None:
    """Return the session of this name, and the one it comes from; None without a name."""
    return None if root is None or root == "" else child_session(str(root), "", _word(parent))


def _word(value: _Key) -> str:
    return "" if value is None else str(value)


class Common(_SessionFields, gc=False):
    """Fields every kind has."""

    model: str | None = None
    stream: bool | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    add_special_tokens: Raw = NO_RAW
    truncate_prompt_tokens: Raw = NO_RAW


class Templated(Common, gc=False):
    """Inputs of a chat template besides the messages.

    `tool_choice` and `response_format` steer decoding and do not change the prompt, so they are not among these."""

    tools: Raw = NO_RAW
    documents: Raw = NO_RAW
    chat_template: Raw = NO_RAW
    chat_template_kwargs: Raw = NO_RAW
    mm_processor_kwargs: Raw = NO_RAW
    media_io_kwargs: Raw = NO_RAW
    reasoning_effort: Raw = NO_RAW
    add_generation_prompt: Raw = NO_RAW
    continue_final_message: Raw = NO_RAW


class Chat(Templated, gc=False):
    messages: list[Raw] = []
    max_tokens: int | None = None
    max_completion_tokens: int | None = None


class Completion(Common, gc=False):
    prompt: Raw = NO_RAW
    suffix: Raw = NO_RAW
    prompt_embeds: Raw = NO_RAW
    max_tokens: int | None = None


class Responses(Templated, gc=False):
    input: Raw = NO_RAW
    instructions: Raw = NO_RAW
    reasoning: Raw = NO_RAW
    prompt: Raw = NO_RAW
    previous_response_id: Raw = NO_RAW
    conversation: Raw = NO_RAW
    max_output_tokens: int | None = None
    client_metadata: _ClientMetadata | None = None
    store: bool | None = None

    def own_session(self) -> Session | None:
        if self.client_metadata is not None and (session := self.client_metadata.session()):
            return session
        return _named(_id_of(self.conversation))

    def history(self) -> tuple[str | None, bool]:
        """Return the id of the response, or conversation, that this request goes on from, and whether another request
        may go on from its response."""
        earlier = _id_of(self.previous_response_id) or _id_of(self.conversation)
        return bounded_key(earlier) or None, self.store is not False


class Embeddings(Templated, gc=False):
    input: Raw = NO_RAW
    messages: list[Raw] | None = None


class _Metadata(msgspec.Struct, gc=False):
    user_id: _Key = None


class Messages(Templated, gc=False):
    messages: list[Raw] = []
    system: Raw = NO_RAW
    thinking: Raw = NO_RAW
    output_config: Raw = NO_RAW
    metadata: _Metadata | None = None
    cache_control: _Kept | None = None  # of the whole request; those of its parts are read with these
    max_tokens: int | None = None

    def retention_s(self) -> float | None:
        return None if self.cache_control is None else _seconds(self.cache_control.ttl) or DEFAULT_TTL_S

    def own_session(self) -> Session | None:
        return session_of_user(_word(self.end_user()))

    def end_user(self) -> _Key:
        return self.user if self.metadata is None else self.metadata.user_id


class _Named(msgspec.Struct):
    id: str = ""


_decode_id: Callable[[Raw], str | _Named] = msgspec.json.Decoder(str | _Named).decode


def _id_of(raw: Raw) -> str:
    """Of an object that is given by its id, or as itself; "" of anything else."""
    if raw is NO_RAW:
        return ""
    try:
        named = _decode_id(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    return named if isinstance(named, str) else named.id
