"""Bodies as agents and chat clients send them, of every form that engines read, for property tests."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

HEADER = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={};"
MARK = {"cache_control": {"type": "ephemeral"}}

texts = st.one_of(
    st.sampled_from(["a", "b", '"}]}', "\\", "\n", "cache_control", "é漢", HEADER.format(1), HEADER.format(2) + "\nx"]),
    st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=6),
)
_names = st.sampled_from(["f", "g"])
_inputs = st.dictionaries(st.sampled_from(["x", "cache_control"]), st.one_of(texts, st.integers(0, 3)), max_size=2)
_schemas = st.fixed_dictionaries(
    {"type": st.just("object")}, optional={"cache_control": texts, "required": st.just([])}
)


def _marked(blocks: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(lambda block, mark: {**block, **mark}, blocks, st.sampled_from([{}, MARK]))


_text_blocks = _marked(texts.map(lambda text: {"type": "text", "text": text}))
_marked_text = st.one_of(
    st.just("Hi"), st.lists(_marked(st.just({"type": "text", "text": "Hi"})), min_size=1, max_size=2)
)
_results = _marked(
    st.builds(
        lambda content: {"type": "tool_result", "tool_use_id": "t1", "content": content},
        st.one_of(texts, st.lists(_text_blocks, max_size=2)),
    )
)
_calls = _marked(
    st.builds(lambda name, given: {"type": "tool_use", "id": "t1", "name": name, "input": given}, _names, _inputs)
)
_thoughts = texts.map(lambda text: {"type": "thinking", "thinking": text, "signature": "s"})
_users = st.one_of(texts, st.lists(st.one_of(_text_blocks, _results), min_size=1, max_size=3))
_assistants = st.one_of(texts, st.lists(st.one_of(_text_blocks, _calls, _thoughts), min_size=1, max_size=3))


@st.composite
def messages_bodies(draw: st.DrawFn) -> dict[str, Any]:
    """For `/v1/messages`; the last message is never empty, since engines refuse a prompt without any."""
    messages = [{"role": "user", "content": draw(_users)}, {"role": "assistant", "content": draw(_assistants)}]
    last = {"role": "user", "content": draw(_marked_text)}
    body: dict[str, Any] = {"model": "m", "max_tokens": 1, "messages": [*messages[: draw(st.integers(0, 2))], last]}
    if draw(st.booleans()):
        body["system"] = draw(st.one_of(texts, st.lists(_text_blocks, min_size=1, max_size=3)))
    if draw(st.booleans()):
        tools = st.builds(lambda name, schema: {"name": name, "input_schema": schema}, _names, _schemas)
        body["tools"] = draw(st.lists(_marked(tools), min_size=1, max_size=2))
    return body


_outputs = st.one_of(texts, st.lists(texts.map(lambda text: {"type": "input_text", "text": text}), max_size=2))
_items = st.one_of(
    st.builds(lambda content: {"role": "user", "content": content}, _outputs),
    texts.map(lambda text: {"type": "message", "role": "assistant", "content": text}),
    texts.map(
        lambda text: {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
    ),
    texts.map(lambda text: {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}),
    st.builds(lambda name: {"type": "function_call", "call_id": "c1", "name": name, "arguments": '{"x": "a"}'}, _names),
    _outputs.map(lambda output: {"type": "function_call_output", "call_id": "c1", "output": output}),
)


@st.composite
def responses_bodies(draw: st.DrawFn) -> dict[str, Any]:
    """For `/v1/responses`, with all of the history."""
    given = draw(st.one_of(texts, st.lists(_items, min_size=1, max_size=4)))
    body: dict[str, Any] = {"model": "m", "max_output_tokens": 1, "input": given}
    if draw(st.booleans()):
        body["instructions"] = draw(texts)
    if draw(st.booleans()):
        body["tools"] = [{"type": "function", "name": draw(_names), "parameters": draw(_schemas)}]
    return body


_chat_parts = _marked(texts.map(lambda text: {"type": "text", "text": text}))
_chat_calls = st.builds(
    lambda name: [{"id": "c1", "type": "function", "function": {"name": name, "arguments": '{"x": "a"}'}}], _names
)


@st.composite
def chat_bodies(draw: st.DrawFn) -> dict[str, Any]:
    """For `/v1/chat/completions`."""
    contents = st.one_of(texts, st.lists(_chat_parts, min_size=1, max_size=3))
    messages: list[dict[str, Any]] = [{"role": "user", "content": draw(contents)}]
    if draw(st.booleans()):
        messages.insert(0, {"role": "system", "content": draw(contents)})
    if draw(st.booleans()):
        messages.append({"role": "assistant", "content": draw(contents)})
        if draw(st.booleans()):
            messages[-1]["tool_calls"] = draw(_chat_calls)
            messages.append({"role": "tool", "tool_call_id": "c1", "content": draw(contents)})
    body: dict[str, Any] = {"model": "m", "max_tokens": 1, "messages": messages}
    if draw(st.booleans()):
        body["tools"] = [{"type": "function", "function": {"name": draw(_names), "parameters": draw(_schemas)}}]
    return body
