"""The date of responses."""

from __future__ import annotations

from kvproxy.proxy.listener.cycle import HttpDate
from kvproxy.proxy.listener.server import serve
from tests.proxy.listener.client import connect, echo

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


def test_the_date_is_made_once_a_second() -> None:
    """And is an IMF-fixdate."""
    made = iter(["Sun, 06 Nov 1994 08:49:37 GMT", "Sun, 06 Nov 1994 08:49:38 GMT"])
    date = HttpDate(lambda: next(made))
    assert date.line(0.0) == date.line(0.9) == b"date: Sun, 06 Nov 1994 08:49:37 GMT"
    assert date.line(1.0) == b"date: Sun, 06 Nov 1994 08:49:38 GMT"


async def test_every_response_has_a_date() -> None:
    """Also one to what is no request."""
    async with serve(echo) as url, connect(url) as client:
        await client.send(GET)
        assert b"\r\ndate: " in (await client.response())[0]
        await client.send(b"nonsense\r\n\r\n")
        assert b"\r\ndate: " in await client.head()
