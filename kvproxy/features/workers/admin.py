"""Admin listener of several workers: one page, one set of metrics, and changes that are made in all of them.

Every path of a worker's own admin app is there. Reads are merged from all; changes are made in all; a place that
`/pick` reserves is in one, whose number its id begins with, and a prompt is warmed by one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, count, zip_longest
from typing import Any

import httpx
import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from kvproxy.base.errors import Problem
from kvproxy.base.installed import installed
from kvproxy.base.types import Clock
from kvproxy.features.workers.answers import (
    Page,
    add_pages,
    find_rule,
    keep_counts,
    merge_answers,
    parse_page,
    write_page,
)
from kvproxy.features.workers.assignment import Change
from kvproxy.features.workers.control import FROM
from kvproxy.features.workers.workers import ANSWER_S, Workers
from kvproxy.operate.admin.app import AccessControl, guard_routes, set_root_level
from kvproxy.operate.admin.config_file import describe_file, find_refused_file
from kvproxy.operate.admin.event_log import describe_events
from kvproxy.operate.admin.live import EVENTS, PageFiles
from kvproxy.operate.admin.process import AdviceRoutes, SettingsRoutes
from kvproxy.operate.admin.replies import MAX_BODY_BYTES, Audit, RequestRefused, read_number, receive_body, reply_json
from kvproxy.operate.feature import Feature
from kvproxy.operate.merge import merge_events, merge_findings
from kvproxy.operate.metrics.catalog import merge_rules
from kvproxy.operate.metrics.page import render_exposition
from kvproxy.operate.runtime.operated import ConfigFinding, OperatorFinding

_CHANGING = ("POST", "PUT", "PATCH", "DELETE")
_PASSED_ON = ("content-type", "cache-control", "allow")
#: Default number of rows that a worker answers with.
_LIMITS = {"/decisions": 100, "/cache/hot": 20, "/warm": 100}
_LONGEST_CHANGE_S = 3600


class MetricsOfAll:
    """Sums of the workers' metrics. A worker's last counts still count after its end."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._last: dict[int, Page] = {}
        self._gone: Page = {}
        self._rules = merge_rules()

    def note_ended(self, index: int) -> None:
        """Note the end of this worker's process."""
        self._gone = add_pages([self._gone, keep_counts(self._last.pop(index, {}))], self._rules)

    async def render(self) -> bytes:
        """Return the page."""
        asked = {slot.index: slot.process for slot in self._workers.serving}
        answers = await self._workers.ask_all(Change("GET", "/metrics"), self._workers.serving)
        for slot in self._workers.serving:
            if (answer := answers.get(slot.index)) is not None and slot.process is asked.get(slot.index):
                self._last[slot.index] = parse_page(answer.text)
        own = parse_page((await render_exposition(self._workers.metrics.registry)).decode())
        return write_page(add_pages([own, self._gone, *self._last.values()], self._rules))


class Questions:
    """Puts an operator's questions to one worker, to the next in turn, or to all."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._turn = count()

    async def ask(self, index: int, change: Change, **options: Any) -> httpx.Response:
        """Return one worker's answer. RequestRefused when it gives none."""
        slot = next((one for one in self._workers.serving if one.index == index), None)
        answer = None if slot is None else await self._workers.ask(slot, change, **options)
        if answer is None:
            raise _nothing_serves()
        return answer

    async def ask_one(self, request: Request, **options: Any) -> tuple[int, httpx.Response]:
        """Return the next worker in turn, and its answer to this request."""
        body = await receive_body(request, most=self._workers.config.limits.body + MAX_BODY_BYTES)
        serving = self._workers.serving
        if not serving:
            raise _nothing_serves()
        index = serving[next(self._turn) % len(serving)].index
        said = {FROM.decode(): _origin_of(request)}
        return index, await self.ask(index, Change("POST", _target(request), body), headers=said, **options)

    async def ask_all(self, target: str) -> list[httpx.Response]:
        """Answers in the order of the workers; RequestRefused when there is none."""
        found = await self._workers.ask_all(Change("GET", target), self._workers.serving)
        answers = []
        for index, one in found.items():
            if one is not None:
                one.extensions["worker"] = index
                answers.append(one)
        if not answers:
            raise _nothing_serves()
        return answers

    def decode(self, answers: Sequence[httpx.Response]) -> list[Any]:
        """Decode the answers; a decision's number includes its worker."""
        found = []
        for one in answers:
            data = one.json()
            for decision in (*data.get("decisions", ()), *data.get("failed_decisions", ())):
                decision["number"] = self.number(decision["number"], one.extensions["worker"])
            found.append(data)
        return found

    def number(self, number: int, worker: int) -> int:
        """Return the number that a worker's decision has here."""
        return number * len(self._workers.supervisor.slots) + worker


class WorkersAdmin:
    """Reads, changes and picks; `app` is all of it behind access control."""

    def __init__(self, workers: Workers, *, clock: Clock) -> None:
        self.metrics = MetricsOfAll(workers)
        self._workers = workers
        self._clock = clock
        self._found_at = clock()
        self._questions = Questions(workers)

    def app(self) -> AccessControl:
        """Return the ASGI app."""
        workers = self._workers
        audit = Audit()
        routes = [
            *PageFiles().list_routes(),
            Route("/healthz", self._healthz, methods=["GET"]),
            Route("/readyz", self._readyz, methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
            Route("/live", self._live, methods=["GET"]),
            Route("/decisions/{number:int}", self._decision, methods=["GET"]),
            Route("/pick", self._pick, methods=["POST"]),
            Route("/pick/{index:int}-{rest:path}", self._picked, methods=["POST"]),
            Route("/warm", self._warm, methods=["POST"]),
            Route("/log", self._log, methods=["PATCH"]),
            *AdviceRoutes(workers, audit).list_routes(),
            *(
                one
                for one in SettingsRoutes(workers, audit, set_level=set_root_level).list_routes()
                if one.path != "/log"
            ),
            Route("/{path:path}", self._read, methods=["GET"]),
            Route("/{path:path}", self._change, methods=list(_CHANGING)),
        ]
        return guard_routes(routes, token=lambda: workers.config.admin.token)

    async def _healthz(self, request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def _readyz(self, request: Request) -> Response:
        """Where one worker is ready, clients are served."""
        if self._workers.supervisor.ending.is_set():
            return PlainTextResponse("draining\n", 503)
        answers = await self._questions.ask_all("/readyz")
        best = next((one for one in answers if one.is_success), answers[0])
        return PlainTextResponse(best.text, best.status_code)

    async def _metrics(self, request: Request) -> Response:
        return Response(await self.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    async def _live(self, request: Request) -> Response:
        answers = await self._questions.ask_all(_target(request))
        if not all(one.is_success for one in answers):
            return _passed_on(answers)
        live = merge_answers("/live", self._questions.decode(answers))
        now = self._clock()
        reloader = self._workers.reloader
        live["findings"] = merge_findings([self._own_findings(), live["findings"]])
        live["config_file"] = describe_file(reloader, now)
        own_events = () if reloader is None else describe_events(reloader.events, now)
        live["events"] = merge_events([live["events"], own_events])[:EVENTS]
        live["workers"] = [
            {"number": slot.index, "serves": slot.ready, "pid": slot.process.pid if slot.process else None}
            for slot in self._workers.supervisor.slots
        ]
        return reply_json(live)

    def _own_findings(self) -> list[dict[str, Any]]:
        """Of the configuration, and workers that are gone."""
        age_s = self._clock() - self._found_at
        found: list[tuple[OperatorFinding, float]] = [(one, age_s) for one in self._workers.findings]
        troubles = filter(None, (slot.trouble for slot in self._workers.supervisor.slots))
        found += [(ConfigFinding("problem", "workers", one, "its last lines in the log"), 0.0) for one in troubles]
        now = self._clock()
        found += [(one, now - since) for one, since in find_refused_file(self._workers.reloader, now)]
        return [
            {"severity": one.severity, "where": one.where, "what": one.what, "fix": one.fix, "age_s": age}
            for one, age in found
        ]

    async def _decision(self, request: Request) -> Response:
        number = request.path_params["number"]
        workers = len(self._workers.supervisor.slots)
        answer = await self._questions.ask(number % workers, Change("GET", f"/decisions/{number // workers}"))
        if not answer.is_success:
            return _passed_on([answer])
        return reply_json({**answer.json(), "number": number})

    async def _pick(self, request: Request) -> Response:
        index, answer = await self._questions.ask_one(request)
        if answer.status_code != 201:
            return _passed_on([answer])
        shown = answer.json()
        shown["reservation"]["id"] = f"{index}-{shown['reservation']['id']}"
        return reply_json(shown, 201)

    async def _picked(self, request: Request) -> Response:
        index = request.path_params["index"]
        rest = request.path_params["rest"]
        change = Change("POST", f"/pick/{rest}", await receive_body(request))
        return _passed_on([await self._questions.ask(index, change)])

    async def _warm(self, request: Request) -> Response:
        """Send each prompt through one worker; all learn of the endpoints' new contents."""
        return _passed_on([(await self._questions.ask_one(request, timeout_s=_find_slow("/warm")))[1]])

    async def _read(self, request: Request) -> Response:
        path = request.url.path
        answers = await self._questions.ask_all(_target(request))
        if not all(one.is_success for one in answers):
            return _passed_on(answers)
        most = int(request.query_params.get("limit", _LIMITS[path])) if path in _LIMITS else None
        if path == "/warm":  # lines, each worker's hottest first; duplicates are removed
            ranks = zip_longest(*(one.content.splitlines(keepends=True) for one in answers), fillvalue=b"")
            lines = [line for line in dict.fromkeys(chain.from_iterable(ranks)) if line]
            return Response(b"".join(lines[:most]), media_type=answers[0].headers["content-type"])
        return reply_json(merge_answers(path, self._questions.decode(answers), limit=most))

    async def _change(self, request: Request) -> Response:
        body = await receive_body(request)
        change = Change(request.method, _target(request), body)
        timeout_s = _find_slow(request.url.path)
        if "timeout_s" in request.query_params:  # the change itself may take so long
            timeout_s = ANSWER_S + read_number(request, default=0, most=_LONGEST_CHANGE_S, name="timeout_s")
        answers = await self._workers.change_all(change, origin=_origin_of(request), timeout_s=timeout_s)
        if not answers:
            raise _nothing_serves()
        if len(answers) == 1 or find_rule(request.url.path) is None:
            return _passed_on(answers)
        merged = merge_answers(request.url.path, [one.json() for one in answers])
        return reply_json(merged, answers[0].status_code)

    async def _log(self, request: Request) -> Response:
        """Change the log level, the supervisor's own included."""
        answer = await self._change(request)
        if answer.status_code == 200:
            set_root_level(str(msgspec.json.decode(answer.body)["level"]).upper())
        return answer


def _find_slow(path: str) -> float | None:
    """Return how long a change of this path may take; None: as long as any."""
    return next((one.slow_changes[path] for one in installed(Feature) if path in one.slow_changes), None)


def _origin_of(request: Request) -> str:
    return request.client.host if request.client else "unknown"


def _target(request: Request) -> str:
    path = request.scope["raw_path"].decode("latin-1")
    query = request.url.query
    return f"{path}?{query}" if query else path


def _passed_on(answers: Sequence[httpx.Response]) -> Response:
    """Return a refusal, or else the first."""
    one = next((each for each in answers if not each.is_success), answers[0])
    headers = {name: one.headers[name] for name in _PASSED_ON if name in one.headers}
    return Response(one.content, one.status_code, headers)


def _nothing_serves() -> RequestRefused:
    return RequestRefused(503, Problem("", "no worker answers", "try again in a moment; the log has the reason"))
