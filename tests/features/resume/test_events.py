"""Events cut out of pieces, and token ids taken out of them."""

from __future__ import annotations

import pytest

from kvproxy.features.resume.events import read_data, split_events, strip_ids, with_data


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
def test_whole_events_are_split_from_the_rest(end: bytes) -> None:
    """Wherever the network cuts them."""
    first, second = b"data: 1" + end, b": note" + end
    assert split_events(first + second + b"data: 2") == ([first, second], b"data: 2")
    assert split_events(b"data: 2") == ([], b"data: 2")
    assert read_data(first) == b"1"
    assert read_data(second) == b""


def test_an_event_keeps_its_name() -> None:
    """With other data."""
    event = b'event: ping\ndata: {"a":1}\n\n'
    assert read_data(event) == b'{"a":1}'
    assert with_data(event, b"{}") == b"event: ping\ndata: {}\n\n"


@pytest.mark.parametrize(
    ("event", "stripped"),
    [
        (b'{"a":1,"token_ids":[1, 2],"b":2}', b'{"a":1,"b":2}'),
        (b'{"prompt_token_ids":[1],"b":2}', b'{"b":2}'),
        (b'{"a":1, "token_ids": null}', b'{"a":1}'),
        (b'{"prompt_token_ids":null,"prompt_text":null,"b":2}', b'{"b":2}'),
        (b'{"content":"say ,\\"token_ids\\":[1]"}', b'{"content":"say ,\\"token_ids\\":[1]"}'),
    ],
)
def test_token_ids_are_taken_out(event: bytes, stripped: bytes) -> None:
    """Members alone: text that looks like one stays."""
    assert strip_ids(event) == stripped
