"""One configured engine and the facts about it, each asked for once however many checks need it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from kvproxy.base.errors import BadResponse, ClientError, NotSupported
from kvproxy.base.installed import installed
from kvproxy.cache.clients.engine_metrics import EngineKind, EngineMetrics, parse_engine_metrics
from kvproxy.cache.clients.event_sources import KvEventSource, stated_sources
from kvproxy.cache.clients.sglang import SglangInfo
from kvproxy.cache.clients.vllm import ModelInfo, VllmClient
from kvproxy.cache.feature import CacheFeature, find_chat_form
from kvproxy.cache.overlap.reports import ReportWatch
from kvproxy.cluster.engine import origin_of
from kvproxy.cluster.settings import DataParallelSettings, EndpointSettings, EventSources
from kvproxy.operate.doctor.engine_link import EngineLink
from kvproxy.operate.doctor.tools import Tools
from kvproxy.operate.doctor.trial import (
    RankAnswers,
    Trial,
    TrialPlan,
    TrialTarget,
    asking_for,
    run_trial,
    send_priority,
    try_ranks,
)

#: A larger number is no count.
_MOST = 2.0**53
_GROWING = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:time_to_first_token_seconds_sum")
_STARTED = "process_start_time_seconds"


@dataclass(frozen=True, slots=True)
class Counters:
    """Figures that only grow and that no two engines share: what an engine did since its start."""

    values: tuple[float, ...]
    started_at: float | None = None  # of the process; the same in all figures of one engine

    @property
    def used(self) -> bool:
        """An engine that did nothing looks like any other."""
        return all(value > 0 for value in self.values)


@dataclass(frozen=True, slots=True)
class PromptLengths:
    """How long this engine's prompts were."""

    count: int
    shorter: tuple[tuple[float, int], ...]  # (prompt length in tokens, prompts at most that long), growing

    def share_below(self, tokens: int) -> float:
        """Return the share of prompts that are surely shorter (the histogram's buckets are coarse)."""
        below = max((count for bound, count in self.shorter if bound < tokens), default=0)
        return below / self.count if self.count else 0.0


def parse_counters(text: bytes) -> Counters | None:
    """None when the engine does not show them."""
    totals = [sum_samples(text, name) for name in _GROWING]
    if None in totals:
        return None
    return Counters(tuple(total for total in totals if total is not None), sum_samples(text, _STARTED))


def parse_prompt_lengths(text: bytes) -> PromptLengths:
    """From `vllm:request_prompt_tokens`, over all ranks and models."""
    buckets = sum_buckets(text, "vllm:request_prompt_tokens")
    return PromptLengths(max(buckets.values(), default=0), tuple(sorted(buckets.items())))


def sum_samples(text: bytes, name: str) -> float | None:
    """Over all ranks and models; None when there is no such sample."""
    known = [sample.value for sample in read_samples(text, name)]
    return sum(known) if known else None


def sum_buckets(text: bytes, name: str) -> dict[float, int]:
    """Return a histogram's counts by the upper bounds of its buckets, over all ranks and models."""
    buckets: dict[float, int] = {}
    for sample in read_samples(text, f"{name}_bucket"):
        with contextlib.suppress(KeyError, ValueError):
            bound = float(sample.labels["le"])
            buckets[bound] = buckets.get(bound, 0) + int(sample.value)
    return buckets


def read_samples(text: bytes, name: str) -> Iterator[Sample]:
    """Yield the samples of a name, but for lines that cannot be read and for values that are no count."""
    start = name.encode()
    for line in text.split(b"\n"):
        if line.startswith((start + b"{", start + b" ")):
            with contextlib.suppress(ValueError):
                [[sample]] = [one.samples for one in text_string_to_metric_families(line.decode() + "\n")]
                if 0.0 <= sample.value <= _MOST:
                    yield sample


T = TypeVar("T")

#: Text whose tokens distinguish tokenizers: words, case, digits, code, accents, CJK, emoji, white space.
SAMPLE_TEXT = "The quick BROWN fox 1234567890 -> def f(x):\n\treturn x**2  # naïve café 你好世界 🙂 \u00a0end"


class EngineFacts:
    """Every fact raises ClientError when the engine cannot be asked; the link itself is a fact that never does."""

    def __init__(
        self,
        endpoint: EndpointSettings,
        *,
        cluster: str,
        health_path: str,
        tools: Tools,
        plan: TrialPlan,
        label: str = "",
        routed: tuple[str, ...] = (),
        stated: EventSources | None = None,
        data_parallel: DataParallelSettings = DataParallelSettings(),
    ) -> None:
        self.endpoint = endpoint
        self.instance_id = endpoint.instance_id or endpoint.id  # its name at LMCache
        self.cluster = cluster
        self.tools = tools
        self.plan = plan
        self.where = label or f"endpoint {endpoint.id}"
        self.origin = origin_of(endpoint)
        self._routed = routed
        self._stated = stated
        self.data_parallel = endpoint.data_parallel or data_parallel
        http = tools.make_client(self.origin)
        key = endpoint.api_key
        authorization = None if key is None else f"Bearer {key.get_secret_value()}"
        self.link = EngineLink(
            f"{cluster}/{endpoint.id}",
            self.origin,
            http,
            where=self.where,
            health_path=health_path,
            headers={} if authorization is None else {"authorization": authorization},
            tools=tools,
        )
        self.trials = EngineTrials(self)
        url = str(self.origin)
        timeout_s = tools.timeouts.exchange_s
        find_form = partial(find_chat_form, installed(CacheFeature))
        self.vllm = VllmClient(http, url, authorization, timeout_s=timeout_s, find_form=find_form)
        self.api = self.vllm.api

    async def list_models(self) -> tuple[ModelInfo, ...]:
        """Return what it serves."""
        return await self.link.ask_once("models", self.vllm.list_models)

    async def fetch_version(self) -> str:
        return await self.link.ask_once("version", self.vllm.fetch_version)

    async def sglang_info(self) -> SglangInfo:
        """Return what it was started with. Raises NotSupported where it is no SGLang."""
        return await self.link.ask_once("sglang info", self.vllm.sglang_info)

    async def find_kind(self) -> EngineKind:
        """Return the kind of engine, by its metrics, else by whether it answers as SGLang does."""
        try:
            kind = parse_engine_metrics(await self.fetch_exposition()).kind
        except ClientError:
            kind = EngineKind.UNKNOWN
        if kind is not EngineKind.UNKNOWN:
            return kind
        try:
            await self.sglang_info()
        except ClientError:
            return EngineKind.VLLM
        return EngineKind.SGLANG

    async def list_sources(self) -> tuple[KvEventSource, ...]:
        """Return its KV event sources: as reported, else as configured for engines that do not report them."""
        try:
            return await self.link.ask_once("kv event sources", self.vllm.kv_event_sources)
        except NotSupported:
            if self._stated is None or not self._stated.endpoint:
                raise
            return stated_sources(self._stated, host=self.origin.host)

    async def needs_tokens(self) -> bool:
        """Return True if prompts are found there by their tokens: by lookups, or by KV events that it publishes."""
        follows = self.plan.follows
        if self.plan.least_tokens or follows is None:
            return bool(self.plan.least_tokens)
        return follows.required or bool(await self.sources_or_none())

    async def tokenize_sample(self) -> tuple[int, ...]:
        """Tokens of a sample text by `/tokenize`."""

        async def tokenize() -> tuple[int, ...]:
            return tuple(await self.vllm.tokenize_prompt((await self.choose_model()).id, SAMPLE_TEXT))

        return await self.link.ask_once("sample", tokenize)

    async def fetch_exposition(self) -> bytes:
        """`/metrics` as it was before the doctor's own requests."""
        return await self.link.ask_once("metrics", self.exposition_now)

    async def shown_ranks(self) -> tuple[int, ...]:
        """Its data-parallel ranks by its metrics, if there are several."""
        try:
            return tuple(sorted(parse_engine_metrics(await self.fetch_exposition()).ranks))
        except ClientError:
            return ()

    async def choose_model(self) -> ModelInfo:
        """Return the model to try: a declared or routed one that is served, else the first that is no adapter."""
        models = {one.id: one for one in await self.list_models()}
        for name in (*self.endpoint.models, *self._routed):
            if name in models:
                return models[name]
        found = next((one for one in models.values() if one.parent is None), None)
        if found is None:
            raise BadResponse(f"{self.where} serves no model")
        return found

    async def exposition_now(self) -> bytes:
        """Return a new scrape of `/metrics`."""
        return await self.vllm.fetch_exposition(timeout_s=self.tools.timeouts.exchange_s)

    async def metrics_now(self) -> EngineMetrics | None:
        """Return the same as figures; None where the engine shows none."""
        try:
            return await self.vllm.fetch_metrics(timeout_s=self.tools.timeouts.exchange_s)
        except ClientError:
            return None

    async def sources_or_none(self) -> tuple[KvEventSource, ...]:
        """() where the engine cannot name them."""
        try:
            return await self.list_sources()
        except ClientError:
            return ()

    async def is_asleep(self) -> bool:
        """Return True if its metrics report that it sleeps. They are read before our own requests show in them."""
        try:
            return parse_engine_metrics(await self.fetch_exposition()).asleep
        except ClientError:
            return False


class EngineTrials:
    """Requests that a visit sends to one engine, each once: to generate, for its ranks, with a priority."""

    def __init__(self, engine: EngineFacts) -> None:
        self._engine = engine

    async def try_generating(self) -> Trial:
        """Two requests of one token each."""
        return await self._engine.link.ask_once("trial", self._run_trial)

    async def send_priority(self, *, chat: bool) -> None:
        """Send a request of one token with a `priority`. Raises ClientError."""
        await send_priority(await self._target(), chat=chat)

    async def try_ranks(self) -> RankAnswers | None:
        """Return what it makes of requests for its ranks, as configured or else shown; None where there are none."""
        ranks = self._engine.data_parallel.ranks or await self._engine.shown_ranks()
        if not ranks or not self._engine.data_parallel.steer:
            return None
        target = await self._target()
        return await self._engine.link.ask_once("ranks", lambda: try_ranks(target, ranks))

    async def _run_trial(self) -> Trial:
        engine = self._engine
        if await engine.is_asleep():
            raise ClientError(f"{engine.where} sleeps")
        tools = engine.tools
        follows = engine.plan.follows
        sources = () if follows is None else await engine.sources_or_none()
        watches = [] if follows is None else [follows.watch(sources, clock=tools.clock, wall_clock=tools.wall_clock)]
        target = await self._target(watches if sources else ())
        answers = await self.try_ranks()
        # the second prompt finds the first one's blocks only on the same rank
        if answers is not None and answers.taken:
            target = asking_for(target, next(iter(answers.taken.values())))
        return await run_trial(target, engine.plan)

    async def _target(self, watches: Sequence[ReportWatch] = ()) -> TrialTarget:
        engine = self._engine
        model = await engine.choose_model()
        return TrialTarget(model, engine.api, engine.vllm, watches, engine.metrics_now, engine.tools)
