"""Prompts with media, as engines' KV events report them in the wire formats of vLLM and SGLang."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from kvproxy.base.types import EndpointId
from kvproxy.cache.indexes.precise import PreciseIndex, precise_root
from kvproxy.cache.media.cut import Medium, MediumKind
from kvproxy.cache.overlap.media_reports import ServedPrompt
from kvproxy.cache.prefix.hashing import TEXT_BLOCK_BYTES, token_blocks
from kvproxy.features.kv_events.decoding import decode_batch
from kvproxy.features.kv_events.reported_prompts import ReportedPrompts
from tests.features.kv_events.support import frames

A, B = EndpointId("a"), EndpointId("b")
SIZE = 4
PLACEHOLDER = 151_655
#: Text, the picture's six tokens in the blocks 2 to 3, text. Five whole blocks and two tokens.
FRONT = list(range(10, 20))
BEHIND = list(range(30, 36))
PICTURE_TOKENS = 6
PROMPT_TOKENS = len(FRONT) + PICTURE_TOKENS + len(BEHIND)
WHOLE_BLOCKS = PROMPT_TOKENS // SIZE


class Cluster:
    """One cluster's index of events, and what was learned from them."""

    def __init__(self) -> None:
        self.precise = PreciseIndex()
        self.reported = ReportedPrompts(self.precise)
        self.counted: list[tuple[str, str, int]] = []
        self.reported.on_counted = lambda model, medium, tokens: self.counted.append((model, medium.key, tokens))
        self._seq = 0

    def report(self, *events: dict[str, Any], endpoint: EndpointId = A) -> None:
        """Apply a published message of these events."""
        for event in decode_batch(frames(self._seq, *events)).events({}):
            self.precise.apply_events(endpoint, 0, [event])
        self._seq += 1
        self.reported.events_came(endpoint)

    def serve(self, one: ServedPrompt, endpoint: EndpointId = A) -> None:
        self.reported.note_served(endpoint, one)

    def find_blocks(self, one: ServedPrompt, *, parts: int = 1) -> int:
        """Return how many blocks the endpoint `a` is found to hold of a prompt of so many messages."""
        keys = [*one.keys, *range(1000, 999 + parts)]
        known = self.reported.find_beginning(keys, one.hashes, one.media)
        if known is None:
            return 0
        match = self.precise.match_prompt(lambda size: known.hashes).get(A)
        return 0 if match is None else match.tokens // SIZE


def picture(name: str, *, start: int = 0) -> Medium:
    return Medium(MediumKind.IMAGE, name, 64, 64, start, TEXT_BLOCK_BYTES)


def served(
    name: str = "cat", *, key: int = 1, text: int = 7, tokens: int = PROMPT_TOKENS, noted: int = 0, **changes: Any
) -> ServedPrompt:
    """Return a prompt of one message with a picture; `text` stands for what is in front of it."""
    one = ServedPrompt("m", [key], array("Q", [text, key]), (picture(name),), no_blocks, tokens, noted)
    return one._replace(**changes)


def no_blocks(size: int) -> array[int]:
    return array("Q")


def known_front(tokens: Sequence[int]) -> array[int]:
    return token_blocks(array("I", tokens), SIZE, precise_root(SIZE))


def stored(identifier: str = "id-cat", *, first: int = 0, last: int = WHOLE_BLOCKS, chain: int = 0) -> dict[str, Any]:
    """Return the event of vLLM 0.32 for some blocks of the prompt; `chain` makes other engine hashes."""
    tokens = [*FRONT, *[PLACEHOLDER] * PICTURE_TOKENS, *BEHIND]
    starts = [len(FRONT) - block * SIZE for block in range(WHOLE_BLOCKS)]
    touched = [-PICTURE_TOKENS < start < SIZE for start in starts]
    extra = [[[identifier, start]] if touches else None for start, touches in zip(starts, touched, strict=True)]
    hashes = [100 * (chain if block >= len(FRONT) // SIZE else 0) + block + 1 for block in range(WHOLE_BLOCKS)]
    return {
        "type": "BlockStored",
        "block_hashes": hashes[first:last],
        "parent_block_hash": hashes[first - 1] if first else None,
        "token_ids": tokens[first * SIZE : last * SIZE],
        "block_size": SIZE,
        "medium": "GPU",
        "extra_keys": extra[first:last],
    }


@pytest.mark.parametrize("events_first", [True, False])
def test_events_name_the_blocks_of_a_prompt_with_a_picture(events_first: bool) -> None:
    """Whether they come before the answer's end or after it; and they show how many tokens the picture has."""
    cluster = Cluster()
    assert cluster.find_blocks(served()) == 0
    steps = [lambda: cluster.report(stored()), lambda: cluster.serve(served())]
    for step in steps if events_first else reversed(steps):
        step()
    assert cluster.find_blocks(served()) == WHOLE_BLOCKS
    assert cluster.counted == [("m", "cat", PICTURE_TOKENS)]


@pytest.mark.parametrize("cuts", [(0, 2, 5), (0, 3, 5), (0, 1, 2, 3, 4, 5)])
def test_a_prompt_may_come_in_pieces(cuts: tuple[int, ...]) -> None:
    """Prefilled in chunks, or behind text that was stored before."""
    cluster = Cluster()
    for first, last in pairwise(cuts):
        cluster.report(stored(first=first, last=last))
    cluster.serve(served())
    assert cluster.find_blocks(served()) == WHOLE_BLOCKS


def test_a_next_turn_is_found_to_where_its_template_may_change() -> None:
    """The last eight tokens of the earlier prompt may be the generation prompt, but no picture is part of that."""
    cluster = Cluster()
    cluster.report(stored())
    cluster.serve(served())
    assert cluster.find_blocks(served(text=8), parts=2) == (PROMPT_TOKENS - 8) // SIZE
    assert cluster.find_blocks(served(), parts=2) == (len(FRONT) + PICTURE_TOKENS) // SIZE


def test_another_question_behind_the_same_picture_is_found_to_its_end() -> None:
    """Text in front and picture are the same, the message is another one; behind other text it is another prefix."""
    cluster = Cluster()
    cluster.report(stored())
    cluster.serve(served())
    assert cluster.find_blocks(served(key=2)) == (len(FRONT) + PICTURE_TOKENS) // SIZE
    assert cluster.find_blocks(served(key=2, text=8)) == 0


def test_evicted_blocks_are_not_found() -> None:
    """The text in front stays: without the names of the blocks behind it, all of the prompt was taken for held."""
    cluster = Cluster()
    cluster.report(stored())
    cluster.serve(served())
    cluster.report({"type": "BlockRemoved", "block_hashes": [3, 4, 5], "medium": "GPU"})
    assert cluster.find_blocks(served()) == len(FRONT) // SIZE


def test_two_prompts_that_may_be_either_teach_nothing() -> None:
    """Of two new pictures behind equal text at one engine nothing tells which is which. What comes later does."""
    cluster = Cluster()
    cluster.report(stored("id-cat"), stored("id-dog", first=2, chain=1))
    cluster.serve(served("cat"))
    cluster.serve(served("dog", key=2))
    assert cluster.find_blocks(served("cat")) == cluster.find_blocks(served("dog", key=2)) == 0
    assert not cluster.counted


def test_an_identifier_belongs_to_one_content() -> None:
    """A second picture's events are not taken for the first one's, nor the other way round."""
    cluster = Cluster()
    cluster.report(stored("id-cat"))
    cluster.serve(served("cat"))
    cluster.serve(served("dog", key=2, text=8))
    assert cluster.find_blocks(served("dog", key=2, text=8)) == 0
    cluster.report(stored("id-dog", first=2, chain=1))
    assert cluster.find_blocks(served("dog", key=2, text=8)) == WHOLE_BLOCKS
    assert cluster.find_blocks(served("cat")) == WHOLE_BLOCKS
    assert cluster.counted == [("m", "cat", PICTURE_TOKENS), ("m", "dog", PICTURE_TOKENS)]


@pytest.mark.parametrize(
    "other",
    [
        served(tokens=PROMPT_TOKENS + SIZE),
        served(media=(picture("cat"), picture("dog"))),
        served(text_blocks=lambda size: known_front([1, 2, 3, 4])),
        served(noted=1),
    ],
    ids=["length", "media", "text", "was stored before"],
)
def test_events_of_another_prompt_teach_nothing(other: ServedPrompt) -> None:
    """Length in blocks, number of media and known text must be the prompt's."""
    cluster = Cluster()
    cluster.report(stored())
    cluster.serve(other)
    assert len(cluster.reported) == 0


def test_known_text_that_agrees_is_no_hindrance() -> None:
    """As of a prompt whose system message was tokenized."""
    cluster = Cluster()
    cluster.report(stored())
    cluster.serve(served(text_blocks=lambda size: known_front(FRONT[:8])))
    assert cluster.find_blocks(served()) == WHOLE_BLOCKS


def test_events_of_another_engine_teach_nothing() -> None:
    """The endpoint that served the prompt is the one that reports it."""
    cluster = Cluster()
    cluster.report(stored(), endpoint=B)
    cluster.serve(served())
    assert len(cluster.reported) == 0


def test_two_equal_pictures_have_one_identifier() -> None:
    """And two different ones have two."""
    cluster = Cluster()
    event = stored("id-cat")
    event["extra_keys"][4] = [["id-cat", 1]]
    cluster.report(event)
    cluster.serve(served(media=(picture("cat"), picture("dog", start=300))))
    assert len(cluster.reported) == 0
    cluster.serve(served(media=(picture("cat"), picture("cat", start=300))))
    assert cluster.find_blocks(served(media=(picture("cat"), picture("cat", start=300)))) == WHOLE_BLOCKS


def test_a_contradicted_prompt_is_forgotten() -> None:
    """With the names of its pictures, which may be learned again."""
    cluster = Cluster()
    cluster.report(stored())
    cluster.serve(served())
    one = served()
    cluster.reported.forget(one.keys, one.hashes, one.media, one.model)
    assert cluster.find_blocks(served()) == 0
    cluster.serve(served())
    assert cluster.find_blocks(served()) == WHOLE_BLOCKS


def test_names_of_another_version_are_forgotten() -> None:
    """After an upgrade pictures may have other identifiers; while versions are mixed none are used."""
    cluster = Cluster()
    assert cluster.reported.follow_software([None, None])
    cluster.report(stored("id-old"))
    cluster.serve(served())
    assert cluster.reported.follow_software(["vLLM 0.28.0", None])
    assert not cluster.reported.follow_software(["vLLM 0.28.0", "vLLM 0.32.0"])
    assert cluster.find_blocks(served()) == WHOLE_BLOCKS
    assert cluster.reported.follow_software(["vLLM 0.32.0", "vLLM 0.32.0"])
    assert cluster.find_blocks(served()) == 0
    cluster.report(stored("id-new", first=2, chain=1))
    cluster.serve(served(noted=1))
    assert cluster.find_blocks(served()) == WHOLE_BLOCKS


def sglang_pages(wide: Sequence[int]) -> list[dict[str, Any]]:
    """Return one event a page, as SGLang sends them: four ids of 62 bits in turn are the picture."""
    tokens = [*FRONT, *(list(wide) * 2)[:PICTURE_TOKENS], *BEHIND]
    return [
        {
            "type": "BlockStored",
            "block_hashes": [number + 1],
            "parent_block_hash": number or None,
            "token_ids": tokens[number * SIZE : (number + 1) * SIZE],
            "block_size": SIZE,
            "medium": "GPU",
        }
        for number in range(WHOLE_BLOCKS)
    ]


def test_sglang_names_pictures_by_their_tokens() -> None:
    """Over several pages, each an event of its own."""
    cluster = Cluster()
    cluster.report(*sglang_pages([(7 << 58) + number for number in range(4)]))
    cluster.serve(served())
    assert cluster.find_blocks(served()) == WHOLE_BLOCKS
    assert cluster.counted == [("m", "cat", PICTURE_TOKENS)]
    cluster.serve(served("dog", key=2, text=8))
    assert cluster.find_blocks(served("dog", key=2, text=8)) == 0


def test_events_without_media_are_not_kept() -> None:
    """Most engines serve text alone."""
    cluster = Cluster()
    event = stored()
    cluster.report({**event, "extra_keys": [["tenant"], None, None, None, None]})
    assert cluster.reported.noted == 0


def test_a_row_of_a_picture_may_end_in_another_token() -> None:
    """Pixtral's have a break after each row."""
    cluster = Cluster()
    event = stored()
    event["token_ids"][len(FRONT) + 2] = PLACEHOLDER + 1
    cluster.report(event)
    cluster.serve(served())
    assert cluster.counted == [("m", "cat", PICTURE_TOKENS)]
