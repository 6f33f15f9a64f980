"""`kvproxy status`: the live view in a terminal."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvproxy.app import Proxy
from kvproxy.base.errors import ConfigError
from kvproxy.base.types import EndpointId, InferenceRequest, Prompt, RequestKind
from kvproxy.cli import main
from kvproxy.operate.admin.app import build_admin_app
from kvproxy.operate.commands.operate import AdminAddress
from kvproxy.operate.commands.status import describe_adapters, render_page, run
from kvproxy.operate.runtime.history import History
from kvproxy.proxy.metrics import RequestMetrics
from kvproxy.proxy.request.exchange import Exchange, Outcome
from tests.operate.admin.support import admin_of, proxy_of

URL = "http://127.0.0.1:8889"


async def live_of(proxy: Proxy) -> dict[str, Any]:
    """Return the real answer of its admin listener, one request later."""
    history = History(proxy)
    exchange = Exchange(received_at=proxy.clock())
    exchange.inference = InferenceRequest(RequestKind.CHAT, "evil\x1b[2J", Prompt(b"", ()))
    exchange.outcome = Outcome(
        EndpointId("a"), "default", "kv_aware", "overlap", 502, 3, "upstream_died", 0.25, 100, 60
    )
    proxy.recent.finished(exchange, proxy.clock())
    proxy.metrics.group(RequestMetrics).prompt_tokens.labels("default").inc(100)
    proxy.metrics.group(RequestMetrics).cached_tokens.labels("default").inc(60)
    await history.take_sample()
    proxy.admin = build_admin_app(proxy, history)
    async with admin_of(proxy) as client:
        answer: dict[str, Any] = (await client.get("/live")).json()
    return answer


async def test_shown_fields() -> None:
    """Endpoints, decisions, routing; what clients wrote cannot speak to the terminal."""
    text = render_page(await live_of(proxy_of(policy="kv_aware")))
    assert "last minute 1 requests, 1 failed" in text
    assert "from cache 60% (predicted 0%)" in text
    assert "default: kv_aware, learning: no sample yet" in text
    assert "rho" not in text
    lines = text.splitlines()
    heads = "ENDPOINT STATE REQ/MIN ERR/MIN TTFT P95 IN FLIGHT PENDING KV QUEUE SPEED KV EVENTS"
    assert " ".join(lines[2].split()) == heads
    assert " ".join(lines[3].split()) == "a up 1 0 - 0 0 - - - not followed"
    assert " ".join(lines[-1].split()) == "0s ago - evil?[2J a overlap 100 - 60 250ms 502 upstream died +2"
    assert "\x1b" not in text


async def test_the_first_byte_shown_is_that_of_the_latest_requests() -> None:
    """A sample without any says nothing."""
    live = await live_of(proxy_of())
    live["history"]["ttft_p50_s"] = [0.9, 0.5, None]
    assert "first byte 500ms" in render_page(live)


@pytest.mark.parametrize(
    ("changes", "state", "colour"),
    [
        ({}, "up", "32"),
        ({"failures_in_a_row": 1}, "failing", "33"),
        ({"probes_in_doubt": 1}, "not answering", "31;1"),
        ({"condition": "draining"}, "draining", "33"),
        ({"condition": "breaker_open"}, "breaker open", "31;1"),
    ],
)
async def test_states_and_their_colours(changes: dict[str, object], state: str, colour: str) -> None:
    """Colour says nothing that the word does not say too."""
    live = await live_of(proxy_of())
    live["endpoints"][0] |= changes
    assert state in render_page(live)
    assert f"\x1b[{colour}m{state}" in render_page(live, colour=True)


async def test_engine_cache_and_findings() -> None:
    """Everything optional, present and absent."""
    live = await live_of(proxy_of(policy="kv_aware"))
    live["endpoints"][0]["engine"] = {"kv_usage": 0.5, "waiting": 2, "running": None}
    live["routing"]["default"]["learned"] |= {"slowness": {"a": 2.0}, "samples": 1200, "rho": 0.5}
    live["last_minute"]["saved_prefill_s"] = 12.34
    live["cache"] |= {
        "running": [{"about": "pin ab", "instance": "i"}],
        "breakers": {"lookup": "open", "pin": "closed"},
    }
    live["findings"] = [{"severity": "warning", "where": "w", "what": "what", "fix": "do"},
                        {"severity": "note", "where": "w", "what": "only", "fix": ""}]  # fmt: skip
    live["uptime_s"] = 3 * 86400.0
    text = render_page(live)
    assert "50%  2+0    0.50x" in text
    assert "cache work: pin ab running" in text
    assert "breakers: lookup open\n" in text
    assert "warning: w: what (do)\n1 note more: on the live page, or `kvproxy check`\n" in text
    assert "running for 3d" in text
    assert "12.3s of prefill saved" in text
    assert "default: kv_aware, 8,000 tokens/s prefill after 1,200 samples, rho 0.50" in text
    live |= {"cache": None, "endpoints": [], "decisions": []}
    assert "\nENDPOINT" not in render_page(live)


async def test_findings_are_those_of_the_page() -> None:
    """In its order, with its ages; a 500 is red although the answer ended as it should."""
    live = await live_of(proxy_of())
    live["findings"] = [
        {"severity": "problem", "where": "default/a", "what": "down", "fix": "", "age_s": 200.0},
        {"severity": "note", "where": "x", "what": "y", "fix": "", "age_s": 1.0},
        {"severity": "warning", "where": "kvcache", "what": "LMCache does not answer", "fix": "", "age_s": 5.0},
    ]
    live["state"] = {"kind": "warn", "text": "degraded: 2 of 3 up", "sentence": "1 of 3 engines down", "since_s": 200.0}
    live["decisions"][0] |= {"end": "completed", "status": 500, "result": "failed", "retries": 0}
    text = render_page(live)
    assert text.startswith("kvproxy ")
    assert "1 of 3 engines down for 3m" in text.splitlines()[0]
    assert "problem: default/a: down [3m]\nwarning: kvcache: LMCache does not answer [5s]\n1 note more" in text
    assert "\x1b[31;1m500" in render_page(live, colour=True)


@pytest.mark.parametrize(
    ("learned", "foreign", "said"),
    [
        (
            250,
            0.6,
            "a keeps 25% of its reported cache size (learned); 60% of its lookups are sent by others\n",
        ),
        (3000, None, "a keeps 300% of its reported cache size (learned)\n"),
        (900, 0.6, ""),
    ],
)
async def test_a_cache_unlike_its_size(learned: int, foreign: float | None, said: str) -> None:
    """Told apart from one that is nearly as large as its engine says."""
    live = await live_of(proxy_of(policy="kv_aware"))
    live["endpoints"][0]["cache"] |= {
        "told_capacity_blocks": 1000,
        "approximate_capacity_blocks": learned,
        "hit_ratio": {"foreign": foreign},
    }
    text = render_page(live)
    assert said in text
    assert ("reported cache size" in text) is bool(said)


async def test_engines_that_reuse_in_steps() -> None:
    """Alike ones on one line; of many, only the first are named."""
    live = await live_of(proxy_of(policy="kv_aware"))
    assert "in steps" not in render_page(live)
    one = live["endpoints"][0]
    live["endpoints"] = [
        {**one, "id": name, "cache": {**one["cache"], "reuse_step_tokens": step}}
        for name, step in [("a", 4096), ("b", 1056), ("c", 4096), ("d", 4096), ("e", 4096), ("f", None)]
    ]
    text = render_page(live)
    assert "a, c, d and 1 more reuse in steps of 4,096 tokens; prompts under 4,096 never hit\n" in text
    assert "\nb reuses in steps of 1,056 tokens; prompts under 1,056 never hit\n" in text


def answering(*answers: httpx.Response | Exception | dict[str, Any]) -> httpx.MockTransport:
    """Return a listener that gives these answers in turn, the last one for ever."""
    waiting = list(answers)

    def handle(request: httpx.Request) -> httpx.Response:
        answer = waiting.pop(0) if len(waiting) > 1 else waiting[0]
        if isinstance(answer, Exception):
            raise answer
        return httpx.Response(200, json=answer) if isinstance(answer, dict) else answer

    return httpx.MockTransport(handle)


@pytest.mark.parametrize(
    ("url", "answer", "said"),
    [
        (URL, httpx.ConnectError("refused"), "nothing answers at http://127.0.0.1:8889 (refused)"),
        (URL, httpx.Response(401, json={"error": "no"}), "--token-file FILE"),
        (URL, httpx.Response(200, text="<html>"), "not an admin listener"),
        (
            URL,
            httpx.Response(404, json={"error": "there is nothing here"}),
            "answers 404 there is nothing here (",
        ),
        (URL, httpx.Response(200, json=[1]), "answers 200 (--url)"),
        ("nonsense", httpx.Response(200), "no URL"),
    ],
)
def test_nobody_who_could_tell(url: str, answer: httpx.Response | Exception, said: str) -> None:
    """Exit 1 and what to do about it."""
    out, err = io.StringIO(), io.StringIO()
    transport = None if url == "nonsense" else answering(answer)
    assert run(AdminAddress(url), out=out, err=err, transport=transport) == 1
    assert said in err.getvalue()
    assert out.getvalue() == ""


async def test_the_token_comes_from_a_file(tmp_path: Path) -> None:
    """Without the line break an editor leaves at its end."""
    live = await live_of(proxy_of())
    seen: list[str | None] = []

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers.get("authorization"))
        return httpx.Response(200, json=live)

    file = tmp_path / "token"
    file.write_text("s3cret\n")
    out = io.StringIO()
    address = AdminAddress(URL, str(file))
    assert run(address, out=out, err=out, transport=httpx.MockTransport(handle)) == 0
    assert seen == ["Bearer s3cret"]
    file.write_text("\n")
    with pytest.raises(ConfigError, match="holds no token"):
        run(address, out=out, err=out)


class Terminal(io.StringIO):
    """A screen."""

    def isatty(self) -> bool:
        return True


def sleeping(times: int) -> Callable[[float], None]:
    """Sleeps so often, then Ctrl-C."""
    left = [times]

    def sleep(seconds: float) -> None:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    return sleep


async def test_watching_outlives_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each second again, over what was there, until Ctrl-C; a proxy that is down is said so and asked again."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    live = await live_of(proxy_of())
    screen = Terminal()
    transport = answering(live, httpx.ConnectError("refused"), live)
    address = AdminAddress(URL)
    assert run(address, watch=True, out=screen, err=screen, sleep=sleeping(3), transport=transport) == 0
    begun, *shown = screen.getvalue().split("\x1b[H")
    assert begun == "\x1b[?1049h\x1b[?25l"  # a screen of its own, and afterwards the one before
    assert shown[-1].endswith("\x1b[J\x1b[?25h\x1b[?1049l")
    shown[-1] = shown[-1].removesuffix("\x1b[?25h\x1b[?1049l")
    assert len(shown) == 3
    assert screen.getvalue().startswith("\x1b[?1049h")
    assert all("\x1b[J" in each for each in shown)
    assert screen.getvalue().endswith("\x1b[?1049l")
    assert "nothing answers" in shown[1]
    assert "\x1b[32mup" in shown[0]
    assert "\x1b[32mup" in shown[2]


async def test_watching_into_a_file() -> None:
    """Plain text, one screen after the other."""
    live = await live_of(proxy_of())
    out = io.StringIO()
    assert run(AdminAddress(URL), watch=True, out=out, err=out, sleep=sleeping(2), transport=answering(live)) == 0
    assert out.getvalue().count("ENDPOINT  STATE") == 2
    assert "\x1b" not in out.getvalue()


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """No server listens on port 1."""
    assert main(["status", "--url", "http://127.0.0.1:1"]) == 1
    assert "kvproxy status: nothing answers" in capsys.readouterr().err


async def test_the_router_queue() -> None:
    """A row for each cluster that has one, with a word for how it is."""
    live = await live_of(proxy_of(policy="kv_aware", queue={"limit": 1500, "max_wait": "10s"}))
    rows = render_page(live).splitlines()
    heads = "ROUTER QUEUE STATE WAITING OLDEST IN TURN AT BOUND LEFT NO ENDPOINT REFUSED"
    at = [" ".join(line.split()) for line in rows].index(heads)
    assert " ".join(rows[at + 1].split()) == "default empty 0 of 1,500 - 0 0 0 0 0"
    queue = live["routing"]["default"]["queue"]
    queue["released"] |= {"turn": 4, "room": 5, "max_wait": 3, "client_left": 2, "no_endpoint": 1}
    for depth, oldest, state in ((3, 1.0, "holds requests"), (3, 5.0, "long waits"), (1500, 5.0, "full")):
        queue |= {"depth": depth, "oldest_wait_s": oldest, "refused": 7}
        row = " ".join(render_page(live).splitlines()[at + 1].split())
        assert row == f"default {state} {depth:,} of 1,500 {oldest:.1f}s 9 3 2 1 7"
    live["routing"]["default"]["queue"] = None
    assert "ROUTER QUEUE" not in render_page(live)


def test_adapters_in_a_sentence_an_engine() -> None:
    """How many, and which of them are in a slot; an engine without adapters says nothing."""
    endpoints = [
        {"id": "a", "adapters": {"served": ["x"], "loaded": [], "slots": None}},
        {"id": "b", "adapters": {"served": list("vwxyz"), "loaded": list("vwxy"), "slots": 4}},
        {"id": "c", "adapters": None},
    ]
    assert describe_adapters(endpoints) == [
        "a serves 1 adapter, 0 loaded",
        "b serves 5 adapters, 4 of 4 slots loaded: v, w, x and 1 more",
    ]
