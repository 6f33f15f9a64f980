"""Which broken streams go on, by which grade, and with which request."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvproxy.base.types import RequestKind
from kvproxy.features.resume.mismatch import Mismatch
from kvproxy.features.resume.plan import Plan, Wishes, plan_leg, read_request
from kvproxy.features.resume.progress import Progress
from kvproxy.features.resume.settings import Grade
from kvproxy.features.resume.splice import Splice
from kvproxy.features.resume.text_leg import TextLeg, less_kept

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 100}
GREEDY = {**CHAT, "temperature": 0}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
IMAGE = {"type": "image_url", "image_url": {"url": "http://x"}}


def progress_of(words: int = 20, *, ids: bool = True) -> Progress:
    """Return an answer of so many words, a token each."""
    progress = Progress()
    progress.role_sent = True
    progress.prompt_ids = b"[1,2,3]" if ids else b""
    for number in range(words):
        progress.add(f" word{number}", [100 + number] if ids else None)
    return progress


def plan(body: dict[str, Any], progress: Progress, grade: Grade = Grade.TEXT, **wishes: Any) -> Plan | str:
    """Return the plan for a broken chat or text completion."""
    kind = RequestKind.CHAT if "messages" in body else RequestKind.COMPLETION
    target = b"/v1/chat/completions?x=1" if kind is RequestKind.CHAT else b"/v1/completions"
    request = read_request(kind, target, json.dumps(body).encode())
    assert request is not None
    return plan_leg(request, progress, Wishes(grade, **wishes))


def leg_of(planned: Plan | str) -> tuple[str, dict[str, Any]]:
    """Return target and body of its leg."""
    assert isinstance(planned, Plan), planned
    return planned.leg.target.decode(), json.loads(planned.leg.body)


def test_token_ids_go_on_as_a_text_completion() -> None:
    """Prompt and answer but for its last 8 tokens, which are computed again; the limit is less by what came."""
    target, body = leg_of(plan({**GREEDY, "min_tokens": 15, "seed": 1}, progress_of(), Grade.EXACT))
    assert target == "/v1/completions?x=1"
    assert body["prompt"] == [1, 2, 3, *range(100, 112)]
    assert (body["max_tokens"], body["min_tokens"]) == (88, 3)
    assert body["return_token_ids"] is body["stream"] is True
    assert "messages" not in body


def test_a_sampled_answer_goes_on_behind_its_last_text() -> None:
    """A second draw would not come out the same. Tokens without text are drawn again."""
    progress = progress_of()
    progress.add("", [7])
    planned = plan(CHAT, progress, Grade.EXACT)
    assert leg_of(planned)[1]["prompt"] == [1, 2, 3, *range(100, 120)]
    assert isinstance(planned, Plan)
    assert planned.place.chars == progress.chars


def test_text_that_may_begin_a_stop_string_is_computed_again() -> None:
    """The engine holds it back, so that the place in the text is further on than what came with its tokens."""
    progress = progress_of()
    planned = plan({**GREEDY, "stop": ["0123456789", "x"]}, progress, Grade.EXACT)
    assert isinstance(planned, Plan)
    mark = next(mark for mark in progress.marks if mark.tokens == planned.place.tokens)
    assert planned.place.chars == mark.chars + 9 <= progress.chars - 9


def test_an_answer_without_a_limit_ends_with_the_context() -> None:
    """A text completion without a limit would end after 16 tokens."""
    body = {name: value for name, value in GREEDY.items() if name != "max_tokens"}
    assert leg_of(plan(body, progress_of(), Grade.EXACT, context_tokens=1000))[1]["max_tokens"] == 1000 - 3 - 12
    assert plan(body, progress_of(), Grade.EXACT) == "max_tokens"


def test_text_goes_on_behind_a_whole_word() -> None:
    """As the last message, which the engine is told to continue; some words are computed again."""
    target, body = leg_of(plan({**GREEDY, "tools": TOOLS}, progress_of()))
    assert target == "/v1/chat/completions?x=1"
    *earlier, last = body["messages"]
    assert earlier == GREEDY["messages"]
    assert last["role"] == "assistant"
    assert progress_of().text.startswith(last["content"] + " ")
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
    assert body["max_tokens"] == 100 - len(last["content"].split())


def test_text_without_a_word_to_cut_at_is_requested_anew() -> None:
    """All of it must come out the same then."""
    progress = Progress()
    progress.add("x" * 100, None)
    planned = plan(GREEDY, progress, best_effort=True)
    assert isinstance(planned, Plan)
    assert (planned.grade, planned.place.chars) == ("text", 0)
    assert len(leg_of(planned)[1]["messages"]) == 1


@pytest.mark.parametrize(
    "body", [{**CHAT, "tools": TOOLS, "seed": 3, "response_format": {"type": "json_object"}}, CHAT]
)
def test_a_stream_without_text_begins_again(body: dict[str, Any]) -> None:
    """Whatever the request wants."""
    progress = Progress()
    progress.role_sent = True
    planned = plan(body, progress, Grade.EXACT)
    assert isinstance(planned, Plan)
    assert planned.grade == "restart"
    assert leg_of(planned)[1] == {**body, "return_token_ids": True}


REFUSED = [
    ({"n": 2}, "n"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "guided"),
    ({"guided_regex": "a+"}, "guided"),
    ({"structured_outputs": {"choice": ["a"]}}, "guided"),
    ({"tools": TOOLS, "tool_choice": "required"}, "guided"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "guided"),
    ({"logprobs": True}, "logprobs"),
    ({"prompt_logprobs": 1}, "logprobs"),
    ({"use_beam_search": True}, "unusual"),
    ({"truncate_prompt_tokens": 100}, "unusual"),
    ({"include_reasoning": False}, "reasoning"),
    ({"frequency_penalty": 0.5}, "penalties"),
    ({"repetition_penalty": 1.1}, "penalties"),
    ({"temperature": 1, "seed": 4}, "seed"),
    ({"temperature": 1, "stop": "END"}, "stop"),
]


@pytest.mark.parametrize("grade", [Grade.EXACT, Grade.TEXT])
@pytest.mark.parametrize(("fields", "reason"), REFUSED)
def test_requests_that_carry_state_are_not_resumed(fields: dict[str, Any], reason: str, grade: Grade) -> None:
    """A grammar, a random state or counts of tokens are lost with the engine."""
    assert plan({**GREEDY, **fields}, progress_of(), grade) == reason


@pytest.mark.parametrize("fields", [{"frequency_penalty": 0.5}, {"temperature": 1, "seed": 4, "stop": "END"}])
def test_some_are_with_best_effort(fields: dict[str, Any]) -> None:
    """The rest may be another one then."""
    assert isinstance(plan({**GREEDY, **fields}, progress_of(), best_effort=True, proven=True), Plan)


def test_text_that_was_held_back_is_not_lost() -> None:
    """It is in the tokens behind which a sampled answer would go on, and the client has not got it."""
    held = {**CHAT, "stop": "END"}
    assert plan(held, progress_of(), Grade.EXACT, best_effort=True) == "stop"
    planned = plan(held, progress_of(), best_effort=True, proven=True)
    assert leg_of(planned)[1]["messages"][-1]["content"] == progress_of().text
    shown = {**held, "include_stop_str_in_output": True}  # nothing is held back
    planned = plan(shown, progress_of(), Grade.EXACT, best_effort=True)
    assert isinstance(planned, Plan)
    assert planned.place[:2] == (20, len(progress_of().text))


def test_a_leg_begins_at_the_beginning_of_a_character() -> None:
    """Text that came with several tokens may be that of all but the last one."""
    progress = progress_of(4)
    for number in range(20):
        progress.add("海は", [200 + 2 * number, 201 + 2 * number])
    planned = plan(GREEDY, progress, Grade.EXACT)
    assert isinstance(planned, Plan)
    assert planned.place[:2] == (4, 24)  # behind the words, each of which came with one token
    progress.add("x", [900, 901])
    for number in range(8):
        progress.add("y", [1000 + number])
    planned = plan(GREEDY, progress, Grade.EXACT)
    assert isinstance(planned, Plan)
    assert planned.place.tokens == 46  # the text behind x begins with a character of one byte


def test_token_ids_of_the_client_come_once() -> None:
    """Those behind a place in the text, and those of a new draw, would be others."""
    wants = {"return_token_ids": True}
    progress = progress_of()
    progress.ids_wanted = True
    assert plan({**GREEDY, **wants, "tools": TOOLS}, progress, proven=True) == "no_ids"
    assert isinstance(plan({**CHAT, **wants}, progress, Grade.EXACT), Plan)
    progress.add("", [7])
    assert plan({**CHAT, **wants}, progress, Grade.EXACT) == "no_ids"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"tools": TOOLS}, "tools"), ({"messages": [{"role": "user", "content": [IMAGE]}]}, "media")],
)
def test_the_exact_grade_alone_refuses_what_token_ids_lack(fields: dict[str, Any], reason: str) -> None:
    """Tool calls would come as text, and pictures not at all."""
    assert plan({**GREEDY, **fields}, progress_of(), Grade.EXACT) == reason
    assert isinstance(plan({**GREEDY, **fields}, progress_of()), Plan)


def test_a_limit_needs_the_number_of_tokens() -> None:
    """A chunk may have several, so that the rest might go on beyond the limit."""
    unlimited = {name: value for name, value in GREEDY.items() if name != "max_tokens"}
    assert plan(GREEDY, progress_of(ids=False)) == "max_tokens"
    _, body = leg_of(plan(GREEDY, progress_of(ids=False), best_effort=True))
    assert body["max_tokens"] == 100 - 16  # chunks before the overlap
    assert isinstance(plan(unlimited, progress_of(ids=False)), Plan)


def test_a_sampled_answer_goes_on_by_text_only_with_proof() -> None:
    """No word comes twice that would show a template that begins a new turn."""
    body = {**CHAT, "tools": TOOLS}
    assert plan(body, progress_of()) == "unproven"
    assert isinstance(plan(body, progress_of(), proven=True), Plan)


def test_half_a_tool_call_is_never_resumed() -> None:
    """Nor text behind one."""
    progress = progress_of()
    progress.tools = True
    assert plan({**GREEDY, "tools": TOOLS}, progress) == "tools"


def test_text_behind_reasoning_goes_on_only_by_ids() -> None:
    """Templates drop the reasoning of the last message."""
    progress = Progress()
    progress.prompt_ids = b"[1]"
    progress.think(ids_known=True)
    progress.add("", [5, 6])
    assert plan(GREEDY, progress) == "reasoning"
    for number in range(12):
        progress.add(f" w{number}", [number])
    assert leg_of(plan(GREEDY, progress, Grade.EXACT))[1]["prompt"][:3] == [1, 5, 6]
    progress.ids_known = False
    assert plan(GREEDY, progress) == "reasoning"


def test_a_prompt_of_ids_has_no_text_to_go_on_from() -> None:
    """Unless the engine reports the answer's ids."""
    body = {"model": "m", "prompt": [1, 2, 3], "temperature": 0}
    assert plan(body, progress_of(ids=False)) == "no_text"
    assert leg_of(plan(body, progress_of(12)))[1]["max_tokens"] == 16 - 4


def test_long_answers_are_not_kept() -> None:
    """Memory is bounded."""
    progress = progress_of()
    progress.add("x" * (4 * 1024 * 1024), [1])
    assert plan(GREEDY, progress) == "too_long"


def test_a_long_answer_frees_its_memory() -> None:
    """At once, and nothing is added to it any more."""
    progress = progress_of()
    for _ in range(6):
        progress.add("x" * (1024 * 1024), [1])
    assert (progress.text, progress.ids, progress.prompt_ids) == ("", [], b"")
    assert progress.chars < 5 * 1024 * 1024


def test_a_rest_that_grows_too_long_ends_the_stream() -> None:
    """Its last events could not have the whole text."""
    progress = progress_of()
    planned = plan(GREEDY, progress)
    assert isinstance(planned, Plan)
    splice = Splice(planned, progress, greedy=True)
    rest = progress.text[planned.place.chars :]
    assert splice.take(rest, None) == ""
    with pytest.raises(Mismatch, match="too long"):
        splice.take("x" * (5 * 1024 * 1024), None)


@pytest.mark.parametrize("limit", [20, 19])
@pytest.mark.parametrize("ids", [True, False])
def test_of_a_sampled_answer_at_its_limit_the_end_alone_is_requested(limit: int, ids: bool) -> None:
    """Engines generate one token at least, which is dropped; it is not to end the answer. The last tokens of a greedy
    one are computed again."""
    progress = progress_of(ids=ids)
    grade = {"grade": Grade.TEXT, "proven": True, "best_effort": True}
    planned = plan({**CHAT, "max_tokens": limit}, progress, **grade)
    body = leg_of(planned)[1]
    assert isinstance(planned, Plan)
    assert planned.spent
    assert (body["max_tokens"], body["min_tokens"]) == (1, 1)
    splice = Splice(planned, progress, greedy=False)
    assert (splice.take(" more", [7]), splice.began, splice.new_ids) == ("", False, ())
    assert splice.take("", None, last=True) == ""
    assert splice.began
    assert splice.count_output(1) == 20
    greedy = plan({**GREEDY, "max_tokens": limit}, progress_of(ids=ids), **grade)
    assert isinstance(greedy, Plan)
    assert not greedy.spent


def test_an_answer_that_fills_the_context_has_no_rest() -> None:
    """No engine takes a longer prompt."""
    body = {name: value for name, value in CHAT.items() if name != "max_tokens"}
    assert plan(body, progress_of(), Grade.EXACT, context_tokens=23) == "finished"


@pytest.mark.parametrize(
    ("counts", "left"),
    [
        ({"max_tokens": 60, "min_tokens": 50}, {"max_tokens": 5, "min_tokens": 0}),
        ({"min_tokens": 60}, {"min_tokens": 5}),
        ({"max_tokens": 55, "max_output_tokens": 60}, {"max_tokens": 1, "max_output_tokens": 1, "min_tokens": 1}),
    ],
)
def test_bounds_of_an_answer_are_less_by_its_55_tokens_that_came(counts: dict[str, int], left: dict[str, int]) -> None:
    """Where a limit leaves none, one token is requested."""
    assert {name: int(bytes(raw)) for name, raw in less_kept(counts, 55).items()} == left


def test_the_least_tokens_are_less_by_those_that_came() -> None:
    """Where tokens are not known another engine counts them first."""
    wishes = {"proven": True, "best_effort": True}
    planned = plan({**CHAT, "min_tokens": 50}, progress_of(), Grade.TEXT, **wishes)
    assert leg_of(planned)[1]["min_tokens"] == 30
    unlimited = {name: value for name, value in GREEDY.items() if name != "max_tokens"}
    planned = plan({**unlimited, "min_tokens": 50}, progress_of(ids=False), Grade.TEXT)
    assert isinstance(planned, Plan)
    assert isinstance(planned.leg.parts, TextLeg)
    planned = plan(unlimited, progress_of(), Grade.TEXT)
    assert isinstance(planned, Plan)
    assert planned.leg.parts is None


@pytest.mark.parametrize(("logprobs", "reason"), [(0, "logprobs"), (3, "logprobs"), (None, ""), (False, "")])
def test_a_text_completion_with_logprobs_is_not_resumed(logprobs: Any, reason: str) -> None:
    """0 means the log probability of each token alone."""
    planned = plan({"model": "m", "prompt": "a", "temperature": 0, "logprobs": logprobs}, progress_of(12))
    assert planned == reason if reason else isinstance(planned, Plan)


def test_a_text_completion_may_ask_for_the_whole_context() -> None:
    """By null; without a limit it ends after 16 tokens."""
    body = {"model": "m", "prompt": "a", "temperature": 0, "max_tokens": None}
    assert leg_of(plan(body, progress_of(), context_tokens=1000))[1]["max_tokens"] == 1000 - 3 - 12


def test_a_format_that_is_no_object_guides_nothing() -> None:
    """An engine would have refused or ignored it."""
    assert isinstance(plan({**GREEDY, "text": {"format": "text"}}, progress_of()), Plan)


@pytest.mark.parametrize("body", [None, b"", b"[1]", b"{"])
def test_a_body_that_is_no_object_cannot_be_continued(body: bytes | None) -> None:
    """It was streamed to the engine, or only the engine can read it."""
    assert read_request(RequestKind.CHAT, b"/v1/chat/completions", body) is None
