"""`kvproxy status`: what the admin listener's live page shows, in the terminal."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import httpx

from kvproxy.commands.status_table import render
from kvproxy.errors import ConfigError, KvproxyError, Problem

INTERVAL_S = 1.0
_TIMEOUT_S = 5.0
#: The terminal's other screen without a cursor, and back.
_OTHER_SCREEN, _BACK = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"


class NoStatus(KvproxyError):
    """The admin listener did not say; the text tells what to do."""


@dataclass(frozen=True, slots=True)
class StatusOptions:
    """Whom to ask, and how often."""

    url: str
    token_file: str | None = None
    watch: bool = False


def run(
    options: StatusOptions,
    *,
    out: TextIO,
    err: TextIO,
    sleep: Callable[[float], None] = time.sleep,
    transport: httpx.BaseTransport | None = None,
) -> int:
    """Show it once, or again and again until Ctrl-C. 1 when nobody answers the only time it is asked."""
    headers = {} if options.token_file is None else {"authorization": f"Bearer {_token(options.token_file)}"}
    colour = out.isatty() and "NO_COLOR" not in os.environ
    with httpx.Client(headers=headers, timeout=_TIMEOUT_S, trust_env=False, transport=transport) as client:
        if options.watch:
            return _watch(client, options.url, out=out, colour=colour, sleep=sleep)
        try:
            out.write(render(_ask(client, options.url), colour=colour))
        except NoStatus as error:
            print(f"kvproxy status: {error}", file=err)
            return 1
    return 0


def _watch(client: httpx.Client, url: str, *, out: TextIO, colour: bool, sleep: Callable[[float], None]) -> int:
    """On the terminal's other screen, so that what was there before is there again afterwards."""
    enter, leave = (_OTHER_SCREEN, _BACK) if out.isatty() else ("", "")
    try:
        out.write(enter)
        while True:
            try:
                text = render(_ask(client, url), colour=colour)
            except NoStatus as error:
                text = f"{error}\n"
            out.write(_over(text) if out.isatty() else text + "\n")
            out.flush()
            sleep(INTERVAL_S)
    except (KeyboardInterrupt, BrokenPipeError):
        return 0
    finally:
        with contextlib.suppress(BrokenPipeError):
            out.write(leave)
            out.flush()


def _over(text: str) -> str:
    """Written over what is on the screen, without a flicker."""
    return "\x1b[H" + text.replace("\n", "\x1b[K\n") + "\x1b[J"


def _ask(client: httpx.Client, url: str) -> dict[str, Any]:
    try:
        answer = client.get(f"{url.rstrip('/')}/live")
        data = answer.json()
    except (httpx.InvalidURL, httpx.UnsupportedProtocol):
        raise NoStatus(f"{url} is no URL like http://127.0.0.1:8889 (--url)") from None
    except httpx.HTTPError as error:
        raise NoStatus(
            f"nothing answers at {url} ({error or type(error).__name__}): is it the admin listener?"
        ) from None
    except ValueError:
        raise NoStatus(f"{url} is not an admin listener of kvproxy (--url)") from None
    if answer.status_code == 401:
        raise NoStatus("the admin listener wants a token, and this is not the one (--token-file FILE)")
    if not isinstance(data, dict) or answer.status_code != 200 or "endpoints" not in data:
        said = data.get("error", "") if isinstance(data, dict) else ""
        raise NoStatus(f"{url} answers {answer.status_code} {said}".rstrip() + " (--url)")
    return data


def _token(path: str) -> str:
    """The file's text; ConfigError when it cannot be a token."""
    text = Path(path).read_text(encoding="utf-8").strip()
    if not text or not text.isascii() or not text.isprintable():
        raise ConfigError([Problem("--token-file", "holds no token", "one line of printable ASCII")])
    return text
