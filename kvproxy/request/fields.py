"""The fields of each API's body that the proxy reads, and the session they name. Null counts as absent."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec import Raw

from kvproxy.request.session import Session, bounded_key, child_session, session_of_user

NO_RAW = Raw()
_Key = str | int | None


class _Program(msgspec.Struct, gc=False):
    program_id: _Key = None
    agent_id: _Key = None
    parent_program_id: _Key = None


class _Xargs(msgspec.Struct, gc=False):
    session_id: _Key = None
    agentic_context: _Program | str | None = None


class _AgentContext(msgspec.Struct, gc=False):
    session_id: _Key = None
    parent_session_id: _Key = None


class _Nvext(msgspec.Struct, gc=False):
    agent_context: _AgentContext | None = None


class _ClientMetadata(msgspec.Struct, gc=False):
    """What Codex says of itself in a body."""

    thread_id: _Key = None
    session_id: _Key = None
    parent: _Key = msgspec.field(name="x-codex-parent-thread-id", default=None)

    def session(self) -> Session | None:
        """The session it names."""
        root = _word(self.thread_id) or _word(self.session_id)
        return child_session(root, "", _word(self.parent) or _word(self.session_id)) if root else None


class _SessionFields(msgspec.Struct, gc=False):
    """Fields of a body that name a session, whatever its API."""

    session_id: _Key = None
    user: _Key = None
    prompt_cache_key: _Key = None
    vllm_xargs: _Xargs | None = None
    nvext: _Nvext | None = None

    def session(self) -> Session | None:
        """By the first of them that names one."""
        if root := _word(self.session_id):
            return Session(bounded_key(root))
        if self.vllm_xargs is not None and (session := _session_of_xargs(self.vllm_xargs)):
            return session
        context = None if self.nvext is None else self.nvext.agent_context
        if context is not None and (root := _word(context.session_id)):
            return child_session(root, "", _word(context.parent_session_id))
        if session := self.own_session():
            return session
        return Session(bounded_key(user)) if (user := _word(self.end_user())) else None

    def own_session(self) -> Session | None:
        """By fields that only this API has."""
        return None

    def end_user(self) -> _Key:
        """The end user the client speaks for."""
        return self.user

    def cache_group(self) -> str | None:
        """The requests that the client expects to share prefixes."""
        group = _word(self.prompt_cache_key)
        return bounded_key(group) if group else None


def _session_of_xargs(xargs: _Xargs) -> Session | None:
    if root := _word(xargs.session_id):
        return Session(bounded_key(root))
    program = xargs.agentic_context
    if isinstance(program, _Program) and (root := _word(program.program_id)):
        parent = _word(program.parent_program_id)
        if not (agent := _word(program.agent_id)):
            return child_session(root, "", parent)
        return Session(bounded_key(f"{root}/{agent}"), bounded_key(parent or root))
    return None


def _word(value: _Key) -> str:
    return "" if value is None else str(value)


class Common(_SessionFields, gc=False):
    """Fields every kind has."""

    model: str | None = None
    stream: bool | None = None
    cache_salt: str | None = None
    add_special_tokens: Raw = NO_RAW
    truncate_prompt_tokens: Raw = NO_RAW

    def continues(self) -> str | None:
        """The id of the response, or conversation, that this request goes on from."""
        return None

    def continuable(self) -> bool:
        """Whether another request may go on from its response."""
        return False


class Templated(Common, gc=False):
    """What shapes a chat template besides the messages.

    `tool_choice` and `response_format` steer decoding and leave the prompt alone, so they are not among these.
    """

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
        conversation = _id_of(self.conversation)
        return Session(bounded_key(conversation)) if conversation else None

    def continues(self) -> str | None:
        history = _id_of(self.previous_response_id) or _id_of(self.conversation)
        return bounded_key(history) if history else None

    def continuable(self) -> bool:
        return self.store is not False


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
    max_tokens: int | None = None

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
