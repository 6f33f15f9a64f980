"""The live page: its files, and `/live`, what it draws."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from itertools import islice

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvproxy import __version__
from kvproxy.base.background_task import in_slices
from kvproxy.base.errors import Problem
from kvproxy.base.installed import installed
from kvproxy.cluster.endpoint import TAKING
from kvproxy.operate.admin.cache_status import hot_prefixes, running_jobs
from kvproxy.operate.admin.clusters import describe_endpoint, describe_routing
from kvproxy.operate.admin.config_file import describe_file
from kvproxy.operate.admin.event_log import EventLog, describe_events
from kvproxy.operate.admin.failures import count_by_cluster, count_by_endpoint, describe_state
from kvproxy.operate.admin.findings import Trouble
from kvproxy.operate.admin.process import check_readiness
from kvproxy.operate.admin.replies import RequestRefused, encode_part
from kvproxy.operate.admin.troubles import Troubles
from kvproxy.operate.admin.views import list_decisions
from kvproxy.operate.capabilities import SeenEngines, list_capabilities
from kvproxy.operate.feature import Feature
from kvproxy.operate.runtime.history import History, HistorySample, add_tallies, list_quantiles
from kvproxy.operate.runtime.operated import AdminTarget, Conditions, read_conditions
from kvproxy.operate.runtime.recent import Tally
from kvproxy.proxy.request.exchange import FAILED
from kvproxy.proxy.settings import ListenerSettings

_SCRIPTS = ("page", "parts", "table", "charts", "endpoints", "decisions", "advice")
_SCRIPT = "text/javascript; charset=utf-8"
FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    **{f"/{name}.js": (f"{name}.js", _SCRIPT) for name in _SCRIPTS},
}
DECISIONS = 15
HOT = 8
#: Events of the last hour that the page shows; as coarse samples are taken, the first minute of the hour, and its age.
EVENTS = 20
_MINUTE = 6
_HOUR_AGO_S = 3300.0
#: Viewers within this time share one answer, and hot prefixes are searched for no more often.
SHARED_S = 0.5
HOT_AGAIN_S = 5.0
#: Values of `?span=`: five minutes by the second, or an hour by ten.
SPANS = ("5m", "1h")


#: Where panels of features stand in the page, and the script that imports theirs.
_MARK = b"  <!-- panels of features -->\n"
_PANELS = "/panels.js"


def _list_panels() -> Sequence[tuple[str, str]]:
    """Return the name of each panel, with the package that has its files."""
    return [(one.panel, type(one).__module__.rpartition(".")[0]) for one in installed(Feature) if one.panel]


def list_page_paths() -> frozenset[str]:
    """Return the paths of the page and of all that it loads."""
    return frozenset({*FILES, _PANELS, *(f"/{name}.js" for name, _ in _list_panels())})


class PageFiles:
    """`/` and what it loads."""

    def __init__(self) -> None:
        folder = files("kvproxy.operate.admin") / "static"
        self._files = {path: ((folder / name).read_bytes(), kind) for path, (name, kind) in FILES.items()}
        self._add_panels()

    def list_routes(self) -> list[Route]:
        """Their paths."""
        return [Route(path, self._file, methods=["GET"]) for path in self._files]

    def _add_panels(self) -> None:
        """Put the panels of features into the page, and list their scripts in the order of the features."""
        shown = []
        for name, package in _list_panels():
            shown.append((files(package) / f"{name}.html").read_bytes())
            self._files[f"/{name}.js"] = ((files(package) / f"{name}.js").read_bytes(), _SCRIPT)
        page, kind = self._files["/"]
        self._files["/"] = (page.replace(_MARK, b"".join(shown)), kind)
        names = [name for name, _ in _list_panels()]
        imports = [f'import {{ show as {name} }} from "./{name}.js";\n' for name in names]
        self._files[_PANELS] = (f"{''.join(imports)}\nexport const PANELS = [{', '.join(names)}];\n".encode(), _SCRIPT)

    async def _file(self, request: Request) -> Response:
        body, kind = self._files[request.url.path]
        return Response(body, headers={"content-type": kind, "cache-control": "no-cache"})


class LiveView:
    """`/live`: the present, and the last minutes as series."""

    def __init__(self, operated: AdminTarget, history: History) -> None:
        self._operated = operated
        self._history = history
        self._troubles = Troubles(operated)
        self._started_at = operated.clock()
        self._answers: dict[str, tuple[float, bytes]] = {}  # by span
        self._hot: list[dict[str, object]] = []
        self._hot_at = -HOT_AGAIN_S
        self._events = EventLog(operated)
        history.on_sample.append(self._look)

    def list_routes(self) -> list[Route]:
        """Its path."""
        return [Route("/live", self._live, methods=["GET"])]

    async def _live(self, request: Request) -> Response:
        now = self._operated.clock()
        span = request.query_params.get("span", SPANS[0])
        if span not in SPANS:
            raise RequestRefused(400, Problem("span", "there is no such span", f"allowed: {', '.join(SPANS)}"))
        made_at, body = self._answers.get(span, (now - SHARED_S, b""))
        if now - made_at >= SHARED_S:
            await self._refresh_hot(now)
            body = msgspec.json.encode(await self.describe(now, span))
            self._answers[span] = (now, body)
        return Response(body, media_type="application/json", headers={"cache-control": "no-store"})

    async def describe(self, now: float, span: str = SPANS[0]) -> dict[str, msgspec.Raw]:
        """All of it as JSON by key, but for hot prefixes, which are as of the last look. Made in slices: parts may be a
        moment apart."""
        operated = self._operated
        conditions = await read_conditions(operated.clusters, now)
        findings = await self._look(now, conditions)
        minute = self._minute(now)
        endpoints = await self._endpoints(now, minute)
        shown = {"endpoints": encode_part(endpoints)}
        async for key, make in in_slices(self._list_parts(now, span, conditions, minute).items()):
            shown[key] = encode_part(make())
        shown["findings"] = encode_part(
            [
                {"severity": one.severity, "where": one.where, "what": one.what, "fix": one.fix, "age_s": now - since}
                for one, since in findings
            ]
        )
        async for feature in in_slices(installed(Feature)):
            shown |= {key: encode_part(part) for key, part in feature.describe_live(operated).items()}
        return shown

    def _list_parts(
        self, now: float, span: str, conditions: Conditions, minute: Tally
    ) -> Mapping[str, Callable[[], object]]:
        operated = self._operated
        ready, why = check_readiness(operated)
        counted = _counted(minute)
        down_since = self._events.down_since()
        return {
            "version": lambda: __version__,
            "time": lambda: operated.wall_clock().isoformat(timespec="seconds"),
            "uptime_s": lambda: now - self._started_at,
            "ready": lambda: ready,
            "readiness": lambda: why,
            "state": lambda: describe_state(operated, now, conditions, **counted, down_since=down_since),
            "config_file": lambda: describe_file(operated.reloader, now),
            "public_url": lambda: operated.public_url or _url_of(operated.config.listen),
            "last_minute": lambda: {**counted, "saved_prefill_s": self._saved_s(now, conditions)},
            "ttft": lambda: self._ttft(now),
            "clusters": lambda: {name: _counts(*found) for name, found in count_by_cluster(minute).items()},
            "history": lambda: _series(self._history.samples if span == SPANS[0] else self._history.hour, now),
            "routing": lambda: {name: describe_routing(one, now) for name, one in operated.clusters.items()},
            "capabilities": lambda: list_capabilities(operated.config, _count_engines(operated), operated),
            "cache": lambda: self._cache(now),
            "decisions": lambda: list_decisions(operated, DECISIONS),
            "failed_decisions": lambda: list_decisions(operated, DECISIONS, result=FAILED),
            "events": lambda: describe_events(self._events.list_events(), now)[:EVENTS],
        }

    def _minute(self, now: float) -> Tally:
        return add_tallies(one.tally for one in self._history.last_minute(now))

    async def _look(self, now: float, conditions: Conditions | None = None) -> list[tuple[Trouble, float]]:
        """Note what changed, and return the findings with when each was seen first."""
        conditions = conditions or await read_conditions(self._operated.clusters, now)
        self._events.follow(now, conditions)
        samples = self._history.last_minute(now)
        minute = add_tallies(one.tally for one in samples)
        failures = add_tallies(one.failures for one in samples)
        return await self._troubles.update_findings(now, conditions, minute, failures)

    def _ttft(self, now: float) -> dict[str, float | None]:
        """Seconds to the first byte of streamed answers: of the last minute, and of the same minute an hour ago."""
        _, p95 = list_quantiles(self._operated.recent.ttfts_since(now - 60.0))
        hour = self._history.hour
        then = [one.ttft_p95_s for one in islice(hour, _MINUTE) if now - one.at >= _HOUR_AGO_S and one.ttft_p95_s]
        return {"p95_s": p95, "p95_hour_ago_s": max(then, default=None)}

    def _saved_s(self, now: float, conditions: Conditions) -> float | None:
        """Estimate the engine seconds of prefill saved by caches in the last minute; None while no cluster has learned
        a speed, and while no engine is up, since earlier savings do not describe the present."""
        if not any(one in TAKING for found in conditions.values() for one in found.values()):
            return None
        speeds = [one.speeds for one in self._operated.clusters.values() if one.speeds is not None]
        if not any(one.estimates(now).samples for one in speeds):
            return None
        return sum(sample.saved_s for sample in self._history.last_minute(now))

    async def _endpoints(self, now: float, minute: Tally) -> list[msgspec.Raw]:
        operated = self._operated
        routed = count_by_endpoint(minute)
        errors = add_tallies(one.attempt_failures for one in self._history.last_minute(now))
        ttfts = operated.recent.ttfts_by_endpoint(now - 60.0)
        described = (
            {
                "cluster": name,
                **describe_endpoint(operated, name, endpoint),
                "requests_last_minute": routed.get((name, str(endpoint.id)), 0),
                "errors_last_minute": errors.get((name, str(endpoint.id)), 0),
                "ttft_p95_s": list_quantiles(ttfts.get((name, endpoint.id), ()))[1],
            }
            for name, cluster in list(operated.clusters.items())
            for endpoint in cluster.endpoints
        )
        return [encode_part(one) async for one in in_slices(described)]

    def _cache(self, now: float) -> dict[str, object] | None:
        kvcache = self._operated.kvcache
        if kvcache is None:
            return None
        return {
            "running": running_jobs(kvcache),
            "waiting": kvcache.actions.jobs.waiting,
            "leases": len(kvcache.overlap.store.list_pins(now)),
            "breakers": kvcache.breakers.states(),
            "hot": self._hot,
            **kvcache.observers.describe("live", now),
        }

    async def _refresh_hot(self, now: float) -> None:
        kvcache = self._operated.kvcache
        if kvcache is not None and now - self._hot_at >= HOT_AGAIN_S:
            self._hot_at = now
            self._hot = await hot_prefixes(kvcache, HOT)


def _count_engines(operated: AdminTarget) -> SeenEngines:
    endpoints = [one for cluster in operated.clusters.values() for one in cluster.endpoints]
    return SeenEngines(len(endpoints), ranks=sum(one.rank is not None for one in endpoints))


def _series(samples: Iterable[HistorySample], now: float) -> dict[str, Sequence[float | None]]:
    """One value a sample, the oldest first; `ago_s` shows when."""
    kept = list(samples)
    return {
        "ago_s": [round(now - one.at, 2) for one in kept],
        "requests": [sum(one.tally.values()) for one in kept],
        "failed": [_failed(one.tally) for one in kept],
        "ttft_p50_s": [one.ttft_p50_s for one in kept],
        "ttft_p95_s": [one.ttft_p95_s for one in kept],
        "prompt_tokens": [one.prompt_tokens for one in kept],
        "cached_tokens": [one.cached_tokens for one in kept],
        "predicted_tokens": [one.predicted_tokens for one in kept],
    }


def _url_of(listen: ListenerSettings) -> str:
    """Return the URL for clients by the configuration; "" for a port chosen at start."""
    host = f"[{listen.host}]" if ":" in listen.host else listen.host
    return f"{'http' if listen.tls is None else 'https'}://{host}:{listen.port}" if listen.port else ""


def _counted(tally: Tally) -> dict[str, int]:
    return _counts(sum(tally.values()), _failed(tally))


def _counts(requests: int, failed: int) -> dict[str, int]:
    return {"requests": requests, "failed": failed}


def _failed(tally: Tally) -> int:
    return sum(count for (_, _, result), count in tally.items() if result == FAILED)
