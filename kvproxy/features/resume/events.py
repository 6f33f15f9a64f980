"""Events of a stream: cut out of its pieces, their data, and the removal of token ids that the client did not ask
for."""

from __future__ import annotations

import re

_events = re.compile(rb".*?(?:\n\n|\r\n\r\n)", re.DOTALL).findall
#: Generated text cannot contain these names: quotes within a JSON string have a backslash before them.
_IDS = rb'"(?:prompt_)?token_ids"\s*:\s*(?:null|\[[\d,\s]*\])|"prompt_text"\s*:\s*null'
_strip = re.compile(rb",\s*(?:" + _IDS + rb")|(?<=\{)(?:\s*(?:" + _IDS + rb")\s*,)+").sub
DONE = b"[DONE]"


def split_events(data: bytes) -> tuple[list[bytes], bytes]:
    """Return the whole events in `data`, each with its blank line, and the beginning of the next one."""
    if b"\r" not in data:  # a tenth of the time
        *whole, rest = data.split(b"\n\n")
        return [event + b"\n\n" for event in whole], rest
    events: list[bytes] = _events(data)
    return events, data[sum(map(len, events)) :]


def read_data(event: bytes) -> bytes:
    """Return the data of an event; b"" of a comment."""
    if event.startswith(b"data:"):
        return event[5 : event.index(b"\n")].strip()
    return b"".join(line[5:].strip() for line in event.splitlines() if line.startswith(b"data:"))


def with_data(event: bytes, data: bytes) -> bytes:
    """Return an event of the same name with other data."""
    names = [line for line in event.splitlines() if line.startswith(b"event:")]
    return b"".join(name + b"\n" for name in names) + b"data: " + data + b"\n\n"


def strip_ids(event: bytes) -> bytes:
    """Return the event without token ids."""
    return _strip(b"", event) if b'token_ids"' in event else event
