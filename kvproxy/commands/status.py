"""`kvproxy status`: what the admin listener's live page shows, in the terminal."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO

import httpx

from kvproxy.commands.admin_client import AdminAddress, AdminRefused, ask
from kvproxy.commands.status_table import render

INTERVAL_S = 1.0

#: As `less` and `top` do it: what was on the terminal before is there again afterwards.
_SCREEN_OF_ITS_OWN, _SCREEN_BACK = "\x1b[?1049h", "\x1b[?1049l"


@dataclass(frozen=True, slots=True)
class StatusOptions:
    """Whom to ask, and how often."""

    url: str
    token_file: str | None = None
    watch: bool = False
    as_json: bool = False


def run(
    options: StatusOptions,
    *,
    out: TextIO,
    err: TextIO,
    sleep: Callable[[float], None] = time.sleep,
    transport: httpx.BaseTransport | None = None,
) -> int:
    """Show it once, or again and again until Ctrl-C. 1 when nobody answers the only time it is asked."""
    colour = out.isatty() and "NO_COLOR" not in os.environ
    with AdminAddress(options.url, options.token_file).client(transport=transport) as client:

        def shown() -> str:
            live = _ask(client, options.url)
            return f"{json.dumps(live)}\n" if options.as_json else render(live, colour=colour)

        if options.watch:
            return _watch(shown, out=out, over=out.isatty() and not options.as_json, sleep=sleep)
        try:
            out.write(shown())
        except AdminRefused as error:
            print(f"kvproxy status: {error}", file=err)
            return 1
    return 0


def _watch(shown: Callable[[], str], *, out: TextIO, over: bool, sleep: Callable[[float], None]) -> int:
    if over:
        out.write(_SCREEN_OF_ITS_OWN)
    try:
        while True:
            try:
                text = shown()
            except AdminRefused as error:
                text = f"{error}\n"
            out.write(_over(text) if over else text + "\n")
            out.flush()
            sleep(INTERVAL_S)
    except (KeyboardInterrupt, BrokenPipeError):
        return 0
    finally:
        if over:
            out.write(_SCREEN_BACK)


def _over(text: str) -> str:
    """Written over what is on the screen, without a flicker."""
    return "\x1b[H" + text.replace("\n", "\x1b[K\n") + "\x1b[J"


def _ask(client: httpx.Client, url: str) -> dict[str, Any]:
    data = ask(client, url, "/live")
    if "endpoints" not in data:
        raise AdminRefused(f"{url} answers 200 (--url)")
    return data
