from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest

from kvproxy.base.types import Prompt
from kvproxy.cache.prefix.hashing import message_chain, mix_keys
from kvproxy.cache.prefix.token_memory import TokenMemory
from tests.support.clock import FakeClock

SYSTEM = b'{"role":"system","content":"s"}'
HELLO = b'{"role":"user","content":"hello"}'
REPLY = b'{"role":"assistant","content":"hi"}'
MORE = b'{"role":"user","content":"more"}'
TOKENS = array("I", range(100))


def chat(*parts: bytes, shape: bytes = b"") -> Prompt:
    return Prompt(shape, parts)


def keys(prompt: Prompt, *, model: str = "m", salt: str = "") -> Sequence[int]:
    return message_chain(prompt, mix_keys(0, (model, salt)))


@pytest.fixture
def memory(clock: FakeClock) -> TokenMemory:
    return TokenMemory(clock=clock, ttl_s=60.0)


def test_the_same_prompt_is_known_exactly(memory: TokenMemory) -> None:
    """All tokens come back."""
    memory.remember(keys(chat(SYSTEM, HELLO)), TOKENS)
    recalled = memory.recall(keys(chat(SYSTEM, HELLO)))
    assert recalled is not None
    assert (recalled.tokens, recalled.exact, recalled.parts_known) == (TOKENS, True, 2)
    assert (memory.stats.exact, memory.stats.missed) == (1, 0)


def test_a_grown_chat_begins_with_what_is_known(memory: TokenMemory) -> None:
    """The generation prompt may look different in the next turn, so its tokens and the cut block are given up."""
    memory.remember(keys(chat(SYSTEM, HELLO)), TOKENS)
    recalled = memory.recall(keys(chat(SYSTEM, HELLO, REPLY, MORE)))
    assert recalled is not None
    assert (recalled.tokens, recalled.exact, recalled.parts_known) == (TOKENS[:80], False, 2)


@pytest.mark.parametrize(("known", "kept"), [(24, 16), (23, None), (40, 32), (39, 16), (7, None)])
def test_tokens_given_up_after_a_miss(memory: TokenMemory, known: int, kept: int | None) -> None:
    """Eight tokens, then whatever is no whole block of sixteen; nothing left is a miss."""
    memory.remember(keys(chat(HELLO)), TOKENS[:known])
    recalled = memory.recall(keys(chat(HELLO, REPLY)))
    assert (None if recalled is None else len(recalled.tokens)) == kept
    assert memory.stats.missed == (kept is None)


def test_the_longest_known_prefix_wins(memory: TokenMemory) -> None:
    """Later turns know more."""
    memory.remember(keys(chat(SYSTEM, HELLO)), TOKENS[:50])
    memory.remember(keys(chat(SYSTEM, HELLO, REPLY, MORE)), TOKENS)
    recalled = memory.recall(keys(chat(SYSTEM, HELLO, REPLY, MORE, REPLY)))
    assert recalled is not None
    assert (len(recalled.tokens), recalled.parts_known) == (80, 4)


@pytest.mark.parametrize(
    ("model", "prompt", "salt"),
    [
        ("other", chat(SYSTEM, HELLO), ""),
        ("m", chat(SYSTEM, HELLO), "tenant"),
        ("m", chat(SYSTEM, HELLO, shape=b'tools[{"name":"t"}]'), ""),
        ("m", chat(SYSTEM, HELLO, shape=b'chat_template_kwargs{"enable_thinking":false}'), ""),
        ("m", chat(SYSTEM, b'{"role":"assistant","content":"hello"}'), ""),
        ("m", chat(SYSTEM, b'{"role":"user","content":[{"type":"text","text":"hello"}]}'), ""),
        ("m", chat(HELLO, SYSTEM), ""),
        ("m", chat(SYSTEM + HELLO), ""),
        ("m", chat(HELLO, shape=SYSTEM), ""),
    ],
)
def test_whatever_shapes_the_template_separates_prompts(
    memory: TokenMemory, model: str, prompt: Prompt, salt: str
) -> None:
    """Model, salt, tools, template arguments, roles, content parts, order and boundaries."""
    memory.remember(keys(chat(SYSTEM, HELLO)), TOKENS)
    assert memory.recall(keys(prompt, model=model, salt=salt)) is None


def test_a_growing_chat_keeps_two_turns(memory: TokenMemory) -> None:
    """A session costs memory once or twice its length, not its square; the turn before can be asked again."""
    parts = [b"%d" % turn for turn in range(20)]
    for turn in range(1, 21):
        memory.remember(keys(chat(*parts[:turn])), TOKENS)
    assert len(memory) == 2
    recalled = memory.recall(keys(chat(*parts[:19])))
    assert recalled is not None
    assert recalled.exact


def test_a_beginning_shared_by_several_chats_stays(memory: TokenMemory) -> None:
    """A common beginning is worth keeping however far one chat has gone."""
    memory.remember(keys(chat(SYSTEM)), TOKENS)
    memory.remember(keys(chat(SYSTEM, HELLO)), TOKENS)
    memory.remember(keys(chat(SYSTEM, MORE)), TOKENS)
    memory.remember(keys(chat(SYSTEM, HELLO, REPLY)), TOKENS)
    recalled = memory.recall(keys(chat(SYSTEM, b"third")))
    assert recalled is not None
    assert recalled.parts_known == 1


def test_remembering_again_changes_only_the_tokens(memory: TokenMemory) -> None:
    """A prompt asked twice is not a chat that grew."""
    memory.remember(keys(chat(SYSTEM)), TOKENS)
    memory.remember(keys(chat(SYSTEM, HELLO)), TOKENS)
    memory.remember(keys(chat(SYSTEM, HELLO)), TOKENS[:50])
    recalled = memory.recall(keys(chat(SYSTEM, HELLO)))
    assert recalled is not None
    assert len(recalled.tokens) == 50
    assert len(memory) == 2


def test_entries_age(memory: TokenMemory, clock: FakeClock) -> None:
    """A template may have changed since."""
    memory.remember(keys(chat(HELLO)), TOKENS)
    clock.advance(61)
    assert memory.held_bytes > 0
    assert memory.recall(keys(chat(HELLO))) is None
    assert memory.held_bytes == 0


def test_bytes_and_entries_are_bounded(clock: FakeClock) -> None:
    """Least recently used prompts go first."""
    memory = TokenMemory(clock=clock, max_bytes=10_000, max_entries=5)
    for session in range(20):
        memory.remember(keys(chat(b"%d" % session)), TOKENS)
        memory.recall(keys(chat(b"0")))
    assert len(memory) == 5
    assert memory.recall(keys(chat(b"0"))) is not None
    memory = TokenMemory(clock=clock, max_bytes=3_000)
    for session in range(20):
        memory.remember(keys(chat(b"%d" % session)), TOKENS)
    assert (len(memory), memory.held_bytes) == (3, 2_850)


def test_a_prompt_over_the_bound_is_not_kept(clock: FakeClock) -> None:
    """It would push everything else out; a prompt without parts has no key."""
    memory = TokenMemory(clock=clock, max_bytes=800)
    memory.remember(keys(chat(HELLO)), TOKENS)
    memory.remember(keys(chat()), TOKENS[:1])
    assert (len(memory), memory.stats.too_large) == (0, 1)
    assert memory.recall(keys(chat())) is None


def test_a_prompt_that_nothing_went_on_from_can_be_forgotten(memory: TokenMemory) -> None:
    """The beginning of a fork stays."""
    first, second = keys(chat(SYSTEM, HELLO)), keys(chat(SYSTEM, HELLO, REPLY, MORE))
    memory.remember(first, TOKENS)
    memory.remember(second, TOKENS + TOKENS)
    for key in (first[-1], second[-1], 12345):
        memory.release(key)
    assert memory.recall(second) is not None
    assert memory.recall(first) is not None
    assert len(memory) == 1


def test_the_only_prompt_can_be_forgotten(memory: TokenMemory) -> None:
    """Nothing is left of it."""
    first = keys(chat(SYSTEM, HELLO))
    memory.remember(first, TOKENS)
    memory.release(first[-1])
    assert (len(memory), memory.held_bytes) == (0, 0)
