"""Ten ways to break a setup: the doctor names each with its fix."""

from __future__ import annotations

import datetime
import io
from dataclasses import replace
from pathlib import Path

import httpx

from kvproxy.lab.simulator.lmcache_chunks import WorkerSettings
from kvproxy.lab.simulator.lmcache_controller import ControllerSettings
from kvproxy.lab.simulator.lmcache_coordinator import CoordinatorSettings
from kvproxy.operate.doctor.report import Severity, print_table
from kvproxy.proxy.settings import ListenerTls
from tests.operate.doctor.setup import ENGINE, FAST, SHORT, cluster, only, visit
from tests.operate.doctor.test_engines import Front
from tests.support.certificates import make_certificate
from tests.support.loopback import serve
from tests.support.ports import free_port
from tests.support.vllms.scale_out import add_scale_out


async def test_a_healthy_cluster() -> None:
    """No findings, exit 0; every subject was looked at, and nothing was skipped."""
    async with cluster() as site:
        report = await visit(site.config())
    assert report.findings == ()
    assert report.skipped == ()
    assert report.exit_status(strict=True) == 0
    assert {one.check for one in report.passed} >= {
        *("configuration", "connection", "health", "api", "version", "models", "generate", "tokenize", "tokenizers"),
        *("agent prompts", "prefix caching", "kv event sources", "kv events", "duplicates", "clock", "open files"),
        *("lmcache", "instance ids", "lookup", "chunk size", "lookup time"),
    }


async def test_only_small_requests_are_sent() -> None:
    """Two generations of one token to each engine and a response; a third at most, for events that were missed."""
    async with cluster() as site:
        await visit(site.config())
        for engine in site.fleet.engines.values():
            paths = [request["path"] for request in engine.state.requests]
            assert sorted({*paths}) == ["/v1/chat/completions", "/v1/responses"]
            assert paths.count("/v1/responses") == 1
            assert engine.state.runner.engine.scheduler.counters.generation_tokens in (3, 4)
            assert len(engine.state.requests) == engine.state.runner.engine.scheduler.counters.generation_tokens


async def test_an_engine_that_refuses_the_priority_it_is_to_be_told() -> None:
    """An older vLLM under fcfs: by `on` a problem, by `auto` a warning."""
    refusing = replace(ENGINE, refuse_priority=True)
    async with cluster({"a": ENGINE, "b": refusing}) as site:
        found = only(await visit(site.config(engine_priority="on")))
        assert (found.severity, found.where) == (Severity.PROBLEM, "endpoint b")
        assert "takes no request with a `priority`" in found.what
        assert "--scheduling-policy priority" in found.fix
        assert only(await visit(site.config(engine_priority="auto"))).severity is Severity.WARNING


async def test_wrong_instance_id() -> None:
    """The engine's LMCache is registered under another name: that name is found, and is the fix."""
    async with cluster() as site:
        endpoints = [{"id": "a", "url": site.urls["a"], "instance_id": "vllm-a"}, {"id": "b", "url": site.urls["b"]}]
        found = only(await visit(site.config(endpoints=endpoints)))
    assert (found.severity, found.check, found.where) == (Severity.PROBLEM, "instance ids", "endpoint a")
    assert "no instance 'vllm-a'" in found.what
    assert found.fix == "set `instance_id: a`"


async def test_swapped_instance_ids() -> None:
    """Both are registered, but each one's prompts are held under the other's name."""
    async with cluster() as site:
        endpoints = [
            {"id": "a", "url": site.urls["a"], "instance_id": "b"},
            {"id": "b", "url": site.urls["b"], "instance_id": "a"},
        ]
        report = await visit(site.config(endpoints=endpoints))
    assert {(one.where, one.check) for one in report.findings} == {("endpoint a", "lookup"), ("endpoint b", "lookup")}
    assert "`instance_id: a`" in report.findings[0].fix


async def test_caching_off() -> None:
    """The engine was started without prefix caching. Then it cannot publish events either."""
    off = replace(ENGINE, engine=replace(FAST, prefix_caching=False))
    async with cluster({"a": ENGINE, "b": off}) as site:
        report = await visit(site.config(), timeouts=replace(SHORT, event_s=0.5))
    caching = next(one for one in report.findings if one.check == "prefix caching")
    assert (caching.severity, caching.where) == (Severity.PROBLEM, "endpoint b")
    assert "prefix caching is off" in caching.what
    assert "--no-enable-prefix-caching" in caching.fix
    assert {one.check for one in report.findings} == {"prefix caching"}
    assert [(one.check, one.where) for one in report.skipped if "caching off" in one.reason] == [
        ("kv events", "endpoint b")
    ]


async def test_cached_tokens_not_shown() -> None:
    """Caching works, but answers do not tell: that is another flag than caching itself."""
    async with cluster({"a": ENGINE, "b": replace(ENGINE, enable_prompt_tokens_details=False)}) as site:
        found = only(await visit(site.config()))
    assert (found.severity, found.check, found.where) == (Severity.WARNING, "prefix caching", "endpoint b")
    assert "--enable-prompt-tokens-details" in found.fix


async def test_events_off() -> None:
    """The proxy is told to follow KV events, and the engine publishes none."""
    async with cluster({"a": ENGINE, "b": replace(ENGINE, kv_events=None)}) as site:
        found = only(await visit(site.config()))
    assert (found.severity, found.check, found.where) == (Severity.PROBLEM, "kv event sources", "endpoint b")
    assert "publishes no KV events" in found.what
    assert "--kv-events-config" in found.fix


async def test_an_engine_that_cannot_say_where_it_publishes() -> None:
    """A warning with the setting that says it; with that, the events arrive."""
    async with cluster({"a": ENGINE}) as site, httpx.AsyncClient(trust_env=False) as client:
        said = (await client.get(f"{site.urls['a']}/kv_event_sources")).json()["0"]
        stated = {name: f"tcp://*:{said[name].rpartition(':')[2]}" for name in ("endpoint", "replay_endpoint")}
        older = Front(site.fleet.engines["a"], {"/kv_event_sources": (404, {"detail": "Not Found"})})
        async with serve(older) as url:
            found = only(await visit(site.config(endpoints={"a": url})))
            mended = await visit(site.config(endpoints={"a": url}, kvcache={"kv_event_sources": stated}))
    assert (found.severity, found.check) == (Severity.WARNING, "kv event sources")
    assert "set `kv_event_sources`" in found.fix
    assert mended.findings == ()
    assert any(one.check == "kv events" for one in mended.passed)


async def test_engines_on_one_host_with_ports_of_their_own() -> None:
    """An endpoint's own setting goes before the filter's."""
    async with cluster({"a": ENGINE}) as site, httpx.AsyncClient(trust_env=False) as client:
        said = (await client.get(f"{site.urls['a']}/kv_event_sources")).json()["0"]
        stated = {name: f"tcp://*:{said[name].rpartition(':')[2]}" for name in ("endpoint", "replay_endpoint")}
        older = Front(site.fleet.engines["a"], {"/kv_event_sources": (404, {"detail": "Not Found"})})
        async with serve(older) as url:
            endpoints = {"a": {"url": url, "kv_event_sources": stated}}
            of_all = {"kv_event_sources": {"endpoint": "tcp://*:1"}}
            report = await visit(site.config(endpoints=endpoints, kvcache=of_all))
    assert report.findings == ()
    assert any(one.check == "kv events" for one in report.passed)


async def test_wrong_port() -> None:
    """Nothing listens there; the address is in the finding, and nothing else is made of it."""
    port = free_port()
    async with cluster({"a": ENGINE}) as site:
        endpoints = {"a": site.urls["a"], "b": f"http://127.0.0.1:{port}"}
        report = await visit(site.config(endpoints=endpoints))
    refused = next(one for one in report.findings if one.check == "connection")
    assert (refused.severity, refused.where) == (Severity.PROBLEM, "endpoint b")
    assert f"nothing listens on 127.0.0.1:{port}" in refused.what
    assert str(port) in refused.fix
    assert {one.check for one in report.findings} == {"connection"}
    assert {one.where for one in report.skipped} == {"endpoint b"}


async def test_port_of_another_service() -> None:
    """Something answers, but it is no engine."""
    async with cluster() as site:
        endpoints = {"a": site.urls["a"], "b": site.controller}
        report = await visit(site.config(endpoints=endpoints))
    assert {(one.where, one.check) for one in report.findings} == {("endpoint b", "health"), ("endpoint b", "api")}
    assert all("is it the engine's port? Correct the url" in one.fix for one in report.findings)


async def test_an_engine_that_speaks_tls(tmp_path: Path) -> None:
    """http in the url, https at the port: one problem, and it is that one."""
    files = make_certificate(tmp_path, "127.0.0.1")
    tls = ListenerTls(certificate=str(files.certificate), private_key=str(files.private_key))
    async with cluster({"a": ENGINE}, controller=None) as site, serve(site.fleet.engines["a"], tls=tls) as url:
        plain = {"a": url.replace("https:", "http:")}
        found = only(await visit(site.config(endpoints=plain, kvcache={"lmcache_endpoint": ""})))
    assert (found.check, found.what) == ("health", "speaks TLS, but its url has http")
    assert "https://" in found.fix


async def test_an_engine_that_requires_a_certificate(tmp_path: Path) -> None:
    """It ends connections without a word; the fix names the settings. With them all is well."""
    files = make_certificate(tmp_path, "127.0.0.1")
    pair = {"certificate": str(files.certificate), "private_key": str(files.private_key)}
    tls = ListenerTls(**pair, client_ca=str(files.certificate))
    async with cluster({"a": ENGINE}, controller=None) as site, serve(site.fleet.engines["a"], tls=tls) as url:
        endpoint = {"id": "a", "url": url, "ca_file": pair["certificate"]}
        report = await visit(site.config(endpoints=[endpoint], kvcache={"lmcache_endpoint": ""}))
        shown = {**endpoint, "cert_file": pair["certificate"], "key_file": pair["private_key"]}
        good = await visit(site.config(endpoints=[shown], kvcache={"lmcache_endpoint": ""}))
    problems = [one for one in report.findings if one.severity is Severity.PROBLEM]
    assert problems
    assert all("set `cert_file` and `key_file`" in one.fix for one in problems)
    assert [one for one in good.findings if one.severity is Severity.PROBLEM] == []


async def test_a_url_copied_from_a_client() -> None:
    """It ends in /v1: the health path gives it away, and that is the one problem beside the file's warning."""
    async with cluster({"a": ENGINE}, controller=None) as site:
        url = {"a": f"{site.urls['a']}/v1"}
        report = await visit(site.config(endpoints=url, kvcache={"lmcache_endpoint": ""}))
    assert [(one.check, one.severity) for one in report.findings] == [
        ("health", Severity.PROBLEM),
        ("configuration", Severity.WARNING),
    ]
    assert "leave /v1 out of the url" in report.findings[0].fix


async def test_findings_are_in_the_order_of_the_file() -> None:
    """a before b, whichever check found them."""
    gone = {name: f"http://127.0.0.1:{free_port()}" for name in ("a", "b", "c")}
    async with cluster({"a": ENGINE}) as site:
        report = await visit(site.config(endpoints=gone))
    out = io.StringIO()
    print_table(report, out)
    lines = [line for line in out.getvalue().splitlines() if line.startswith("PROBLEM  connection")]
    assert [line.split("endpoint ")[1][0] for line in lines] == ["a", "b", "c"]
    skipped = [line for line in out.getvalue().splitlines() if line.startswith("skipped") and "endpoint a" in line]
    assert len(skipped) == 1
    assert "checks" in skipped[0]
    assert "endpoint a: cannot be connected to (" in skipped[0]


async def test_tokens_of_agents_prompts_that_are_not_the_engines() -> None:
    """It makes another prompt of messages than the chat they are: their tokens would match nothing."""
    async with cluster({"a": ENGINE}, controller=None) as site:
        counts = {"/v1/messages/count_tokens": (200, {"input_tokens": 7})}
        async with serve(Front(site.fleet.engines["a"], counts)) as url:
            found = only(await visit(site.config(endpoints={"a": url})))
    assert (found.severity, found.check, found.where) == (Severity.WARNING, "agent prompts", "endpoint a")
    assert "a prompt of /v1/messages has 7 tokens, but " in found.what
    assert "--enable-scale-out" in found.fix


RENDERING = add_scale_out(ENGINE)


async def test_an_engine_that_renders_agents_prompts() -> None:
    """Then the chats that they are do not matter."""
    async with cluster({"a": RENDERING}, controller=None) as site:
        report = await visit(site.config())
    assert report.findings == ()
    said = [one.what for one in report.passed if one.check == "agent prompts"]
    assert said == [
        f"prompts of /v1/{kind} are known by their tokens, rendered by the engine" for kind in ("messages", "responses")
    ]


async def test_an_engine_that_knows_no_agents() -> None:
    """It is too old for these APIs: nothing to say."""
    async with cluster({"a": RENDERING}, controller=None) as site:
        gone = dict.fromkeys(("/v1/messages/count_tokens", "/v1/responses"), (404, {"detail": "Not Found"}))
        async with serve(Front(site.fleet.engines["a"], gone)) as url:
            report = await visit(site.config(endpoints={"a": url}))
    assert "agent prompts" not in {one.check for one in (*report.passed, *report.findings)}


async def test_agents_prompts_that_cannot_be_tokenized() -> None:
    async with cluster({"a": RENDERING}, controller=None) as site:
        broken = {"/v1/messages/render": (500, {"detail": "broken"})}
        async with serve(Front(site.fleet.engines["a"], broken)) as url:
            found = only(await visit(site.config(endpoints={"a": url})))
    assert (found.check, "no tokens of a prompt of /v1/messages" in found.what) == ("agent prompts", True)


async def test_tokenizer_that_differs() -> None:
    """The same model name, other tokens."""
    async with cluster({"a": ENGINE, "b": ENGINE, "c": replace(ENGINE, word_pieces=False)}) as site:
        found = only(await visit(site.config()))
    assert (found.severity, found.check, found.where) == (Severity.PROBLEM, "tokenizers", "endpoint c")
    assert "its tokenizer differs from that of endpoint a" in found.what
    assert "--tokenizer" in found.fix


async def test_controller_down() -> None:
    """Said once, and what depends on it is skipped, not guessed."""
    port = free_port()
    async with cluster(controller=None) as site:
        report = await visit(site.config(kvcache={"lmcache_endpoint": f"http://127.0.0.1:{port}"}))
    found = only(report)
    assert (found.severity, found.check, found.where) == (Severity.PROBLEM, "connection", "lmcache_endpoint")
    assert f"nothing listens on 127.0.0.1:{port}" in found.what
    assert "is it running" in found.fix
    assert {one.check for one in report.skipped} == {"instance ids", "lookup", "chunk size", "lookup time", "actions"}


async def test_chunk_larger_than_the_prompts_that_come() -> None:
    """The engine's own histogram says that hardly any prompt fills a chunk."""
    async with cluster() as site, httpx.AsyncClient(base_url=site.urls["a"], trust_env=False) as client:
        for number in range(300):
            body = {"model": "sim", "prompt": f"hello {number}", "max_tokens": 1}
            (await client.post("/v1/completions", json=body)).raise_for_status()
        found = only(await visit(site.config()))
    assert (found.severity, found.check, found.where) == (Severity.PROBLEM, "chunk size", "endpoint a")
    assert "100% of its 300 prompts were shorter than one chunk of 256 tokens" in found.what
    assert "take `lmcache_endpoint` out" in found.fix
    assert "256 tokens only" in found.fix


async def test_chunk_larger_than_any_prompt() -> None:
    """A coordinator whose chunks no prompt of this model can fill."""
    huge = CoordinatorSettings(chunk_tokens=4096)
    async with cluster({"a": ENGINE}, controller=None, coordinator=huge) as site:
        found = only(await visit(site.config()))
    assert (found.severity, found.check) == (Severity.PROBLEM, "chunk size")
    assert "a chunk of LMCache is larger than a prompt of" in found.what
    assert "start LMCache with a smaller chunk size" in found.fix


async def test_endpoint_without_the_model() -> None:
    """One of two endpoints that are both sent everything serves another model."""
    async with cluster({"a": ENGINE, "b": replace(ENGINE, model="other")}) as site:
        report = await visit(site.config(routes=[{"model": "sim", "cluster": "default"}]))
    missing = next(one for one in report.findings if one.where == "endpoint b")
    assert (missing.severity, missing.check) == (Severity.PROBLEM, "models")
    assert "does not serve the model 'sim'" in missing.what
    assert "--served-model-name sim" in missing.fix
    assert "`models` of the endpoint to its own: other" in missing.fix
    assert "two clusters with `routes`" in missing.fix


async def test_the_odd_one_out() -> None:
    """One of three serves another model: it is named, and not the two that agree."""
    async with cluster({"a": ENGINE, "b": replace(ENGINE, model="other"), "c": ENGINE}) as site:
        report = await visit(site.config())
    models = [one for one in report.findings if one.check == "models"]
    assert {one.where for one in models} == {"endpoint b"}
    assert any("serves the model 'other', which most engines of its cluster do not" in one.what for one in models)
    assert any("does not serve the model 'sim'" in one.what for one in models)


async def test_declared_model_that_is_not_served() -> None:
    """An endpoint promises a model that its engine does not have."""
    async with cluster({"a": ENGINE}) as site:
        endpoints = [{"id": "a", "url": site.urls["a"], "models": ["sim", "llama"]}]
        found = only(await visit(site.config(endpoints=endpoints)))
    assert found.what == "does not serve the model 'llama', which `models` of the endpoint names"


async def test_duplicate_ids() -> None:
    """Two endpoints with one id cannot be loaded: the configuration's own problem is the verdict."""
    async with cluster() as site:
        endpoints = [{"id": "a", "url": url} for url in site.urls.values()]
        report = await visit(site.config(endpoints=endpoints))
    found = only(report)
    assert (found.severity, found.check, found.where) == (Severity.PROBLEM, "configuration", "endpoints[1].id")
    assert "two endpoints have the id 'a'" in found.what
    assert found.fix == "give each an id of its own"
    assert report.exit_status(strict=False) == 1


async def test_one_engine_under_two_names() -> None:
    """Two addresses of one engine: it is counted twice, whatever the urls look like."""
    async with cluster({"a": ENGINE}, controller=None) as site, serve(site.fleet.engines["a"]) as other:
        report = await visit(site.config(endpoints={"a": site.urls["a"], "b": other}))
    found = only(report)
    assert (found.severity, found.check, found.where) == (Severity.PROBLEM, "duplicates", "endpoint b")
    assert "is the same engine as endpoint a" in found.what
    assert other in found.fix


async def test_expired_certificate(tmp_path: Path) -> None:
    """Verification fails because of the date, and the finding says so."""
    yesterday = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
    files = make_certificate(tmp_path, "127.0.0.1", until=yesterday)
    tls = ListenerTls(certificate=str(files.certificate), private_key=str(files.private_key))
    async with cluster({"a": ENGINE}, controller=None) as site, serve(site.fleet.engines["a"], tls=tls) as url:
        endpoints = [{"id": "a", "url": url, "ca_file": str(files.certificate)}]
        report = await visit(site.config(endpoints=endpoints))
    found = only(report)
    assert (found.severity, found.check, found.where) == (Severity.PROBLEM, "connection", "endpoint a")
    assert "has expired" in found.what
    assert "renew" in found.fix


async def test_hashes_that_do_not_agree() -> None:
    """The engine stores in LMCache, the index is not empty, and yet its prompt is not found: the causes are listed."""
    workers = (WorkerSettings("a"), WorkerSettings("c"))
    async with cluster({"a": ENGINE}, controller=ControllerSettings(workers)) as site:
        controller = site.fleet.controller
        assert controller is not None
        controller.workers["c"].admit(range(1000, 2000))
        endpoints = [{"id": "a", "url": site.urls["a"], "instance_id": "c"}]
        controller.workers.pop("a")
        site.fleet.engines["a"]._on_prefilled = None  # what it stores is hashed in another way
        found = only(await visit(site.config(endpoints=endpoints)))
    assert (found.severity, found.check, found.where) == (Severity.PROBLEM, "lookup", "endpoint a")
    assert "though its index is not empty" in found.what
    assert "PYTHONHASHSEED" in found.causes[0]
