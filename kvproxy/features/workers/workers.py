"""All workers as their operator has them: asked together, changed together, and reloaded together or not at all."""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from kvproxy.base.errors import ConfigError, Problem
from kvproxy.base.metrics.groups import Metrics
from kvproxy.features.workers.assignment import Change
from kvproxy.features.workers.control import FROM, RELOAD, REPEAT
from kvproxy.features.workers.metrics import WorkerMetrics
from kvproxy.features.workers.supervisor import Slot, Supervisor
from kvproxy.operate.commands.live_advice import AdviceRunner
from kvproxy.operate.config.schema import Config
from kvproxy.operate.runtime.operated import ConfigReloader, OperatorFinding, Reloaded

log = logging.getLogger("kvproxy")

ANSWER_S = 5.0  # until a worker counts as giving no answer
#: A part of a new configuration may take its time to start.
_PREPARE_S = 30.0
#: Changes repeated in a restarted worker; the oldest beyond are dropped.
MAX_CHANGES = 1000
#: Each change of these adds to the ones before; of others the last one counts.
_ADDING = frozenset({"/endpoints"})

Answers = Mapping[int, httpx.Response | None]


class Workers:
    """An OperatedProcess. Changes are made one at a time; a worker that is starting meanwhile, or cannot do what the
    others did, is started again with all that was changed."""

    def __init__(self, supervisor: Supervisor, *, metrics: Metrics, answer_s: float = ANSWER_S) -> None:
        self.supervisor = supervisor
        self._answer_s = answer_s
        self.metrics = metrics  # the supervisor's own
        self.findings: Sequence[OperatorFinding] = ()
        self.reloader: ConfigReloader | None = None
        self.adviser: AdviceRunner | None = None
        self._one_at_a_time = asyncio.Lock()
        self._clients = {slot.index: _client(slot) for slot in supervisor.slots}
        metrics.group(WorkerMetrics).workers.set_source(lambda: [((), len(self.serving))])

    async def __aenter__(self) -> Workers:
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self._clients.values():
            await client.aclose()

    @property
    def config(self) -> Config:
        """Configuration they serve."""
        return self.supervisor.served.config

    @property
    def serving(self) -> list[Slot]:
        """Workers that can be queried."""
        return [slot for slot in self.supervisor.slots if slot.ready]

    async def ask(
        self, slot: Slot, change: Change, *, headers: Mapping[str, str] | None = None, timeout_s: float | None = None
    ) -> httpx.Response | None:
        """One worker's answer; None when it gives none."""
        sent = {**(headers or {}), **({"content-type": "application/json"} if change.body else {})}
        client = self._clients[slot.index]
        try:
            return await client.request(
                change.method, change.target, content=change.body, headers=sent, timeout=timeout_s or self._answer_s
            )
        except httpx.HTTPError as error:
            what = f"{change.method} {change.target.partition('?')[0]}"
            log.warning("worker %d gives no answer to %s: %s", slot.index, what, type(error).__name__)
            return None

    async def ask_all(
        self,
        change: Change,
        slots: Sequence[Slot],
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Answers:
        """Their answers, by number."""
        asking = [self.ask(slot, change, headers=headers, timeout_s=timeout_s) for slot in slots]
        return {slot.index: answer for slot, answer in zip(slots, await asyncio.gather(*asking), strict=True)}

    async def change_all(
        self, change: Change, *, origin: str, timeout_s: float | None = None
    ) -> Sequence[httpx.Response]:
        """Done by one, which may refuse it, then by the others. Return the first one's answer, if it gave one, before
        those of others that did the same."""
        async with self._one_at_a_time:
            serving = self.serving
            said = {FROM.decode(): origin}
            answers = await self.ask_all(change, serving[:1], headers=said, timeout_s=timeout_s)
            first = next(iter(answers.values()), None)
            if first is None or not first.is_success:
                return [] if first is None else [first]
            others = await self.ask_all(change, serving[1:], headers={**said, REPEAT.decode(): "1"})
            served = self.supervisor.served
            kept = [one for one in served.changes if not _replaces(change, one)]
            served.changes = [*kept, change][-MAX_CHANGES:]
            done = {**answers, **others}
            good = _good(done)
            self.supervisor.note_news(told=good)
            return [one for index, one in done.items() if one is not None and index in good]

    async def reload(self, config: Config) -> Reloaded:
        """Reload: prepared by one, then by the others, and only then taken into use. ConfigError when one refuses it:
        nothing has changed then in any."""
        async with self._one_at_a_time:
            serving = self.serving
            prepare = Change("POST", f"{RELOAD}/prepare", pickle.dumps(config))
            if not serving:
                raise ConfigError([Problem("", "no worker serves", "try again in a moment")])
            for some in (serving[:1], serving[1:]):
                answers = await self.ask_all(prepare, some, timeout_s=_PREPARE_S)
                if problems := _refusals(answers):
                    await self.ask_all(Change("POST", f"{RELOAD}/discard"), serving)
                    raise ConfigError(problems)
            answers = await self.ask_all(Change("POST", f"{RELOAD}/adopt"), serving)
            if config != self.config:  # else a worker that is starting has it as well
                self.supervisor.served.config = config
                self.supervisor.note_news(told=_good(answers))
            said: dict[str, Any] = next(
                (one.json() for one in answers.values() if one is not None and one.is_success), {}
            )
            return Reloaded(after_restart=tuple(said.get("after_restart", ())))


def _client(slot: Slot) -> httpx.AsyncClient:
    transport = httpx.AsyncHTTPTransport(uds=slot.address, verify=False)
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", trust_env=False)


def _replaces(later: Change, earlier: Change) -> bool:
    return later.target not in _ADDING and _subject(later) == _subject(earlier)


def _subject(change: Change) -> str:
    return change.target.replace("/undrain", "/drain")


def _good(answers: Answers) -> set[int]:
    return {index for index, one in answers.items() if one is not None and one.is_success}


def _refusals(answers: Answers) -> list[Problem]:
    """Return what stands against it, each problem once, with the worker where only some have it."""
    found: dict[Problem, list[int]] = {}
    for index, answer in answers.items():
        for problem in _problems(answer):
            found.setdefault(problem, []).append(index)
    return [
        one if len(by) == len(answers) else Problem(one.path, f"worker {by[0]}: {one.message}", one.hint)
        for one, by in found.items()
    ]


def _problems(answer: httpx.Response | None) -> list[Problem]:
    if answer is None:
        return [Problem("", "a worker gives no answer", "try again in a moment")]
    if answer.is_success:
        return []
    return [Problem(one["where"], one["what"], one["fix"]) for one in answer.json()["problems"]]
