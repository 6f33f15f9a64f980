"""The live page in a real browser, over a real proxy and engines on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Send

from kvproxy.app import Proxy
from kvproxy.operate.commands.live_advice import AdviceRunner
from kvproxy.operate.companion import Siblings
from kvproxy.operate.config.load import load_config
from kvproxy.operate.runtime.operated import ConfigFinding
from kvproxy.proxy.listener.server import Server
from tests.browser.conftest import Browser
from tests.features.hygiene.test_prefix_changes import agent, dated, edited
from tests.features.hygiene.test_proxy import reuses_nothing
from tests.support.fake_engine import Call, FakeEngine, answer_ok, reply
from tests.support.loopback import serve
from tests.support.proxy import chat, running_proxy

pytestmark = pytest.mark.browser

ROW = "document.querySelector('#endpoints tr[data-key=\"default/' + arguments[0] + '\"]')"
DECISIONS = "document.querySelectorAll('#decisions tr.decision')"
QUEUE = "document.querySelector('#queues tr[data-key=\"default\"]')"
HOSTILE = '<img src=x onerror="window.hacked=1">'


@dataclass
class Stage:
    """A proxy over two engines, with the default health checks."""

    proxy: Proxy
    admin: Server
    client: httpx.AsyncClient
    engines: dict[str, Server]
    stack: AsyncExitStack
    hold: asyncio.Event  # cleared: the engines keep their answers to themselves
    status: int = 200  # of every answer

    async def stop_engine(self, name: str) -> None:
        """No server listens there any more."""
        await self.engines[name].__aexit__(None, None, None)

    async def ask(self, content: str = "hello", **fields: Any) -> None:
        """One request from a client."""
        await self.client.post("/v1/chat/completions", json=chat(content, **fields))

    def start(self, content: str) -> asyncio.Task[None]:
        """Send the same, streamed, without waiting for it."""
        return asyncio.create_task(self.ask(content, stream=True))


@contextlib.asynccontextmanager
async def stage(**config: Any) -> AsyncIterator[Stage]:
    hold = asyncio.Event()
    hold.set()

    async def behave(engine: FakeEngine, call: Call, send: Send) -> None:
        await hold.wait()
        if on.status == 200:
            await answer_ok(engine, call, send)
        else:
            await reply(send, on.status, b'{"error": {"message": "EngineDeadError"}}')

    async with AsyncExitStack() as stack:
        fakes = {name: FakeEngine(name, behave) for name in ("a", "b")}
        engines = {name: await stack.enter_async_context(Server(fake, drain_s=0.1)) for name, fake in fakes.items()}
        raw = {"endpoints": {name: server.url for name, server in engines.items()}, "policy": "kv_aware", **config}
        raw = {key: value for key, value in raw.items() if value is not None}
        proxy = await stack.enter_async_context(Proxy(load_config(raw)))
        public = await stack.enter_async_context(Server(proxy, drain_s=0.1))
        admin = await stack.enter_async_context(Server(proxy.admin, drain_s=0.1))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=public.url, timeout=10))
        proxy.public_url = public.url
        on = Stage(proxy, admin, client, engines, stack, hold)
        yield on


async def test_it_shows_what_happens(browser: Browser) -> None:
    """Endpoints, a request's decision and hot prefixes, without a complaint of the browser."""
    async with stage() as on:
        await browser.open(on.admin.url)
        await browser.until(f"{ROW}?.innerText.includes('up')", "a")
        for _ in range(3):
            await on.ask("x" * 3000)
        await browser.until(f"{DECISIONS}.length === 3")
        await browser.until("document.querySelectorAll('#hot tbody tr').length > 0")
        await browser.until("document.querySelector('#chart-requests path.one').getAttribute('d').includes('L')")
        summary = await browser.script("return document.querySelector('#endpoints-summary').innerText")
        assert re.search(r"2 of 2 up · \d requests in the last minute, 0 failed", summary)
        assert await browser.complaints() == []


async def test_the_router_queue_is_shown(browser: Browser) -> None:
    """Only where there is one: what waits against what may, full when it is, and what became of those that waited."""
    async with stage(queue={"limit": 2, "max_wait": "20s"}, timeouts={"first_byte": "30s"}) as on:
        await browser.open(on.admin.url)
        await browser.until(f"{QUEUE}?.innerText.includes('empty')")
        on.hold.clear()
        asked = [on.start(f"{number} " * 40_000) for number in range(4)]
        await browser.until(f"{QUEUE}.innerText.includes('2 of 2')")
        assert await browser.script(f"return {QUEUE}.className") == "down"
        assert await browser.script(f"return {QUEUE}.innerText.includes('full: refuses')")
        await on.ask("one too many")
        await browser.until(f"{QUEUE}.lastElementChild.innerText === '1'")
        on.hold.set()
        await asyncio.gather(*asked)
        await browser.until(f"{QUEUE}.innerText.includes('empty') && {QUEUE}.cells[4].innerText === '2'")
        assert await browser.complaints() == []
    async with stage(queue={"enabled": False}) as on:
        await browser.open(on.admin.url)
        await browser.until(f"{ROW}", "a")
        assert await browser.script("return document.querySelector('#queues-card').hidden")


async def test_causes_of_prefix_breaks_are_shown(browser: Browser) -> None:
    """Once something does, with what helps."""
    async with (
        serve(FakeEngine("a", reuses_nothing)) as url,
        running_proxy({"a": url}, policy="kv_aware") as running,
        Server(running.proxy.admin, drain_s=0.1) as admin,
    ):
        await browser.open(admin.url)
        await browser.until("document.querySelectorAll('#endpoints tr').length > 1")
        assert await browser.script("return document.querySelector('#breaks-card').hidden")
        for turn in (8, 9):
            body = {**edited(agent(turn), "system.0.text", dated(f"12:0{turn}")), "max_tokens": 1}
            await running.client.post("/v1/messages", json=body, headers={"x-session-id": "s"})
        await browser.until("document.querySelector('#breaks tbody tr')?.innerText.includes('date or id')")
        row = await browser.script("return document.querySelector('#breaks tbody tr').innerText")
        assert "have the client put changing text into its last message" in row
        assert "system block 1, line 3" in row
        assert await browser.complaints() == []


async def test_other_processes_are_shown(browser: Browser, tmp_path: Path) -> None:
    """A line each, as long as it is there and after it fell silent; nothing where one process decides alone."""
    line = "document.querySelector('#peers tbody tr')"
    sync = {"heartbeat": "50ms"}
    async with (
        serve(FakeEngine("a")) as url,
        running_proxy({"a": url}, siblings=Siblings(tmp_path, 0, 2), sync=sync) as one,
        Server(one.proxy.admin, drain_s=0.1) as admin,
    ):
        await browser.open(admin.url)
        await browser.until("document.querySelector('#peers-state').innerText.includes('is alone')")
        async with running_proxy({"a": url}, siblings=Siblings(tmp_path, 1, 2), sync=sync):
            await browser.until(f"{line}?.innerText.includes('alive')")
            cells = await browser.script(f"return [...{line}.cells].map((cell) => cell.innerText)")
            assert cells[0].endswith("/1")
            assert cells[2].endswith(" ago")
            assert cells[5:7] == ["0", "0"]
            assert await browser.script("return document.querySelector('#peers-state').innerText.includes('is synced')")
        await browser.until(f"!{line}")  # it said that it ends
        assert await browser.complaints() == []
    async with stage() as on:
        await browser.open(on.admin.url)
        await browser.until(f"{ROW}", "a")
        assert await browser.script("return document.querySelector('#peers-card').hidden")


async def test_an_idle_engines_death_is_seen_within_three_seconds(browser: Browser) -> None:
    """With the default settings and no traffic at all; screen readers are told as well."""
    async with stage() as on:
        await browser.open(on.admin.url)
        await browser.until(f"{ROW}?.className === 'good'", "a")
        await browser.until(f"{ROW}?.className === 'good'", "b")
        await on.stop_engine("b")
        await browser.until(f"{ROW}.className === 'down'", "b", within_s=3.0)
        await browser.until("document.querySelector('#news').innerText.includes('default/b')")
        assert await browser.script(f"return {ROW}.className", "a") == "good"


async def test_names_from_clients_are_text(browser: Browser) -> None:
    """A model called like a tag is shown, not run."""
    async with stage() as on:
        await browser.open(on.admin.url)
        await on.ask(model=HOSTILE)
        await browser.until("document.querySelector('#decisions').innerText.includes(arguments[0])", HOSTILE)
        assert not await browser.script("return window.hacked")
        assert await browser.script("return document.images.length") == 0


async def test_the_token_is_asked_for_and_kept_for_the_tab(browser: Browser) -> None:
    """A wrong one is said to be wrong; the right one survives a reload."""
    async with stage(admin={"token": "s3cret"}) as on:
        await browser.open(on.admin.url)
        for token, shown in (("wrong", "!document.querySelector('#token-wrong').hidden"), ("s3cret", f"{ROW}")):
            await browser.until("document.querySelector('#token-dialog').open")
            await browser.script(
                "document.querySelector('#token').value = arguments[0];"
                "document.querySelector('#token-form').requestSubmit()",
                token,
            )
            await browser.until(shown, "a")
        await browser.open(on.admin.url)
        await browser.until(f"{ROW}", "a")
        assert await browser.script("return localStorage.length") == 0


async def test_draining_by_keyboard(browser: Browser) -> None:
    """The button is reached and pressed without a mouse, asks back, and undoes itself."""
    async with stage() as on:
        await browser.open(on.admin.url)
        await browser.until(f"{ROW}", "a")
        await browser.script(f"{ROW}.querySelector('button').focus()", "a")
        focused = await browser.script("return document.activeElement.getAttribute('aria-label')")
        assert focused == "Drain a"
        await browser.call(lambda driver: driver.switch_to.active_element.send_keys("\n"))
        await browser.call(lambda driver: driver.switch_to.alert.accept())
        await browser.until(f"{ROW}.innerText.includes('draining')", "a")
        assert on.proxy.clusters["default"].endpoints[0].draining
        assert await browser.script("return document.activeElement.getAttribute('aria-label')") == "Resume a"
        await browser.call(lambda driver: driver.switch_to.active_element.send_keys("\n"))
        await browser.until(f"{ROW}.className === 'good'", "a")


async def test_a_proxy_that_is_gone(browser: Browser) -> None:
    """The page says since when it knows nothing, and greys what it shows."""
    async with stage() as on:
        await browser.open(on.admin.url)
        await browser.until(f"{ROW}", "a")
        await on.admin.__aexit__(None, None, None)
        await browser.until("document.querySelector('#trouble').innerText.startsWith('kvproxy does not answer.')")
        assert await browser.script("return document.body.classList.contains('stale')")
        pill = await browser.script("const p = document.querySelector('#readiness'); return [p.className, p.innerText]")
        assert pill == ["pill", "stale"]


async def test_every_500_is_red(browser: Browser) -> None:
    """In the header, the findings, the sums, the decisions and the chart: an engine that is dead but answers."""
    async with stage(health={"eject_after": 0}, breaker={"failure_threshold": 1000}) as on:
        on.status = 500
        for _ in range(5):
            await on.ask()
        await browser.open(on.admin.url)
        await browser.until("document.querySelector('#readiness').className === 'pill down'")
        assert "% of requests fail" in await browser.script("return document.querySelector('#readiness').innerText")
        summary = await browser.script("return document.querySelector('#endpoints-summary').innerText")
        assert summary.endswith("5 requests in the last minute, 5 failed")
        findings = await browser.script("return document.querySelector('#findings').innerText")
        assert "100% of 5 requests failed in the last minute" in findings
        pills = await browser.script(f"return [...{DECISIONS}].map((row) => row.lastChild.firstChild.className)")
        assert pills == ["pill down"] * 5
        await browser.until("document.querySelector('#chart-requests path.fail').getAttribute('d').includes('L')")


async def test_an_idle_chart_has_no_red_line(browser: Browser) -> None:
    """Zero failures are a number, not a line; nor is anything said to be learned."""
    async with stage() as on:
        await browser.open(on.admin.url)
        await browser.until("document.querySelector('#chart-requests path.one').getAttribute('d').includes('L')")
        assert (
            await browser.script("return document.querySelector('#chart-requests path.fail').getAttribute('d')") == ""
        )
        work = await browser.script("return document.querySelector('#work').innerText")
        assert "kv_aware · learning: no sample yet" in work
        assert "tokens/s" not in work
        assert await browser.script("return document.querySelector('#saved').innerText") == "–"
        assert await browser.script("return document.querySelector('#sentence').innerText") == "All engines up"
        line = await browser.script("return document.querySelector('#try-it').innerText")
        assert f"curl -s {on.proxy.public_url}/v1/chat/completions" in line


async def test_a_decision_opens_into_its_candidates(browser: Browser) -> None:
    """By keyboard too; meanwhile the list stands still, and the whole id can be copied."""
    async with stage() as on:
        await on.ask("x" * 3000)
        await browser.open(on.admin.url)
        await browser.until(f"{DECISIONS}.length === 1")
        await browser.script(f"{DECISIONS}[0].querySelector('button').focus()")
        await browser.call(lambda driver: driver.switch_to.active_element.send_keys("\n"))
        await browser.until("document.querySelectorAll('#decisions .candidates tbody tr').length === 2")
        assert await browser.script("return document.querySelectorAll('.candidates .chosen').length") == 1
        whole = await browser.script("return document.querySelector('.whole-id code').innerText")
        assert whole == next(iter(on.proxy.recent.latest())).request_id
        await on.ask("y" * 3000)
        await browser.until("document.querySelector('#endpoints-summary').innerText.includes('2 requests')")
        assert await browser.script(f"return {DECISIONS}.length") == 1
        assert await browser.script("return document.querySelector('#decisions-state').innerText") != ""
        await browser.call(lambda driver: driver.switch_to.active_element.send_keys("\n"))
        await browser.until(f"{DECISIONS}.length === 2")


async def test_failed_decisions_only(browser: Browser) -> None:
    """However many good ones came after them."""
    async with stage() as on:
        on.status = 500
        await on.ask()
        on.status = 200
        for _ in range(20):
            await on.ask()
        await browser.open(on.admin.url)
        await browser.until(f"{DECISIONS}.length === 15")
        await browser.script("document.querySelector('#failed-only').click()")
        await browser.until(f"{DECISIONS}.length === 1 && {DECISIONS}[0].innerText.includes('500')")


async def test_a_decision_can_be_linked(browser: Browser) -> None:
    """By the request's id, however many came after it; the choice of the failed is in the address too."""
    async with stage() as on:
        await on.ask("x" * 3000)
        linked = next(iter(on.proxy.recent.latest())).request_id
        for _ in range(20):
            await on.ask()
        await browser.open(f"{on.admin.url}/#{linked}")
        await browser.until("document.querySelector('.whole-id code')?.innerText === arguments[0]", linked)
        assert await browser.script(f"return {DECISIONS}.length") == 16
        await browser.script(f"{DECISIONS}[0].querySelector('button').click()")
        await browser.until("location.hash.length > 1 && location.hash !== '#' + arguments[0]", linked)
        on.status = 500
        await on.ask()
        await browser.open("about:blank")
        await browser.open(f"{on.admin.url}/?failed=1")
        await browser.until(f"{DECISIONS}.length === 1 && {DECISIONS}[0].innerText.includes('500')")
        await browser.script("document.querySelector('#failed-only').click()")
        assert await browser.script("return location.search") == ""
        assert await browser.complaints() == []


async def test_a_total_outage_shouts(browser: Browser) -> None:
    """One sentence, one finding, one event in one line, and no figure of engines that are gone."""
    async with stage(shield="off") as on:
        await on.ask("x" * 3000)
        await browser.open(on.admin.url)
        await browser.until("document.querySelector('#sentence').innerText === 'All engines up'")
        for name in ("a", "b"):
            await on.stop_engine(name)
        await browser.until("document.querySelector('#state').className === 'card down'")
        await browser.until("document.querySelector('#readiness').innerText === 'down: 0 of 2 engines up'")
        sentence = await browser.script("return document.querySelector('#sentence').innerText")
        assert re.match(r"No engine up since \d", sentence)
        await browser.until("document.querySelectorAll('#findings li').length === 1")
        assert "all 2 engines are down" in await browser.script("return document.querySelector('#findings').innerText")
        assert await browser.script("return document.querySelector('#saved').innerText") == "–"
        assert "down" in await browser.script("return document.querySelector('#events').innerText")
        await browser.until("document.querySelectorAll('#chart-requests line.mark.down').length > 0")
        assert await browser.complaints() == []


async def test_an_hour_is_drawn_from_the_coarser_samples(browser: Browser) -> None:
    """At the press of a button."""
    async with stage() as on:
        await browser.open(on.admin.url)
        await browser.until(f"{ROW}", "a")
        await browser.script("document.querySelector('[data-span=\"1h\"]').click()")
        await browser.until("document.querySelector('#chart-ttft .axis').innerText.includes('10 min ago')")
        assert await browser.complaints() == []


LONG = "llama-3.3-70b-instruct-replica-{:02}.inference.svc.cluster.local"


@pytest.mark.parametrize("width", [360, 700, 820, 861, 900, 985, 1100, 1280])
async def test_nothing_scrolls_sideways(browser: Browser, width: int) -> None:
    """Sixteen endpoints with long names in two clusters: the ill on top of theirs, and that on top of the page. A
    finding whose remedy is a long flag."""
    still = {"health": {"active": False}}
    clusters = {
        "well": {"endpoints": {f"e{number}": f"http://127.0.0.1:{number + 1}" for number in range(8)}, **still},
        "production": {
            "endpoints": {LONG.format(number): f"http://127.0.0.1:{number + 9}" for number in range(8)},
            **still,
        },
    }
    routes = [{"prefix": "/a", "cluster": "well"}, {"prefix": "/", "cluster": "production"}]
    async with stage(endpoints=None, policy=None, clusters=clusters, routes=routes) as on:
        on.proxy.clusters["production"].endpoints[5].draining = True
        flag = f"`--kv-events-config '{json.dumps(dict.fromkeys(map(LONG.format, range(4)), True))}'`"
        on.proxy.findings = [ConfigFinding("warning", "endpoint a", "publishes no KV events", f"start it with {flag}")]
        await browser.emulate(width=width)
        await browser.open(on.admin.url)
        await browser.until("document.querySelectorAll('#endpoints tbody tr').length === 18")
        assert await browser.script(_TOO_WIDE, width) == []
        assert await browser.script("return document.documentElement.scrollWidth") <= width
        rows = "[...document.querySelectorAll('#endpoints tbody tr')]"
        keys = await browser.script(f"return {rows}.map((row) => row.dataset.key)")
        assert keys[:2] == ["cluster production", f"production/{LONG.format(5)}"]
        heights = await browser.script(
            "return [...document.querySelectorAll('#endpoints tr.dense')].map((row) => row.offsetHeight)"
        )
        assert width < 700 or max(heights) < 45
        heads = "['.charts', '#endpoints-card'].map((one) => document.querySelector(one).getBoundingClientRect().top)"
        charts, endpoints = await browser.script(f"return {heads}")
        assert (charts < endpoints) is (width > 1100)
        tops = await browser.script("return [...document.querySelectorAll('figure')].map((f) => f.offsetTop)")
        assert (len(set(tops)) == 1) is (width >= 700)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1360])
async def test_every_text_is_readable(browser: Browser, scheme: str, width: int) -> None:
    """WCAG AA contrast of every text on what is behind it, and nothing to scroll sideways for."""
    async with stage(queue={}) as on:
        for _ in range(2):
            await on.ask("x" * 3000, model="org/a-model-with-a-very-long-name-" * 3)
        await on.stop_engine("b")
        await on.ask("y" * 3000)
        await browser.emulate(width=width, scheme=scheme)
        await browser.open(on.admin.url)
        await browser.until(f"{ROW}?.className === 'down'", "b")
        assert await browser.script(_TOO_WIDE, width) == []
        assert await browser.script(_POOR_CONTRAST) == []


#: Elements that reach beyond the screen.
_TOO_WIDE = """
return [...document.body.querySelectorAll("main *, header *")]
  .filter((one) => one.getBoundingClientRect().right > arguments[0] + 0.5 && !one.closest(".unseen, thead, svg"))
  .map((one) => `${one.tagName}.${one.className}: ${one.textContent.slice(0, 40)}`);
"""

#: Texts whose colour is nearer to their background than 4.5 : 1.
_POOR_CONTRAST = """
const part = (c) => { c /= 255; return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
const light = ([r, g, b]) => 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
const behind = (node) => {
  for (; node; node = node.parentElement) {
    const colour = rgb(getComputedStyle(node).backgroundColor);
    if (colour.length === 3 || colour[3] > 0) return colour;
  }
  return [255, 255, 255];
};
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
const poor = [];
while (walker.nextNode()) {
  const node = walker.currentNode.parentElement;
  if (!walker.currentNode.textContent.trim() || !node.checkVisibility()) continue;
  const [a, b] = [light(rgb(getComputedStyle(node).color)), light(behind(node))].sort((x, y) => y - x);
  const ratio = (a + 0.05) / (b + 0.05);
  if (ratio < 4.5) poor.push([walker.currentNode.textContent, ratio]);
}
return poor;
"""


async def test_parts_have_names_for_screen_readers(browser: Browser) -> None:
    """Tables have captions and scoped headings, charts a text, the page a language and one main heading."""
    async with stage() as on:
        await browser.open(on.admin.url)
        await browser.until(f"{ROW}", "a")
        counts = await browser.script(
            "const count = (s) => document.querySelectorAll(s).length;"
            "return [count('table') - count('table > caption'), count('th:not([scope])'), count('h1'),"
            " count('svg:not([aria-label])'), count('html[lang]'),"
            " [...document.querySelectorAll('button')].filter((one) => !/[a-z]{2}/i.test("
            "one.ariaLabel ?? one.textContent)).length]"
        )
    assert counts == [0, 0, 1, 0, 1, 0]


async def test_advice_is_asked_for_and_shown(browser: Browser) -> None:
    """A button starts the adviser; its settings and flags come as text, whatever is in them."""
    said = {
        "notes": ["no receipts"],
        "pools": [{
            "name": "cluster default", "notes": [HOSTILE],
            "advice": [{
                "setting": "KV events", "what": "no KV events", "config": "", "gain": None,
                "flags": [{"engines": "endpoint a", "flag": "--kv-events-config '{...}'"}],
            }],
        }],
    }  # fmt: skip
    runner = AdviceRunner(lambda budget_s: [sys.executable, "-c", f"print({json.dumps(said)!r})"])
    async with stage() as on, runner:
        await browser.open(on.admin.url)
        await browser.until(f"{ROW}", "a")
        assert await browser.script("return document.querySelector('#advice-card').hidden")
        on.proxy.adviser = runner
        await browser.open(on.admin.url)
        await browser.until("!document.querySelector('#advice-card').hidden")
        await browser.script("document.querySelector('#advise').click()")
        await browser.until("document.querySelector('#advice').innerText.includes('--kv-events-config')")
        assert await browser.script("return document.querySelectorAll('#advice li').length") == 3
        assert not await browser.script("return window.hacked")
        assert await browser.complaints() == []
