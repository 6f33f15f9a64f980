"""How an engine is started, where the proxy depends on it: SGLang's arguments, data-parallel ranks, and CORS."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from kvproxy.base.errors import ClientError, NotSupported
from kvproxy.cache.clients.sglang import SglangInfo
from kvproxy.cluster.settings import ClusterSettings, EnginePriorityMode, PriorityOrder
from kvproxy.operate.config.verify import FORECASTING
from kvproxy.operate.doctor.check_trial import TRIAL_CALLS
from kvproxy.operate.doctor.engine import EngineFacts
from kvproxy.operate.doctor.report import Finding, check, ok, problem, warning
from kvproxy.operate.doctor.trial import MAX_TRIED, RankAnswers

#: These generate a token, and check once a second whether it came.
_GENERATING = frozenset({"/health", "/health_generate"})
#: A probe's timeout must be this many times the duration of its answer.
_MARGIN = 2.0
#: Smaller pages mean many events, and long paths through the index, for each prompt.
_SMALL_PAGE = 8


@check("sglang", calls=6)
async def check_sglang(engine: EngineFacts, cluster: ClusterSettings) -> Sequence[Finding]:
    """Compare `/server_info` with the configuration of its cluster."""
    await engine.list_models()  # a server that is no engine is reported elsewhere
    try:
        info = await engine.sglang_info()
    except NotSupported:
        return []
    faults = [*await _probes(engine, cluster), *_priority(engine, cluster, info), *_pages(engine, info)]
    return [ok(engine.where, _describe(info)), *faults]


async def _probes(engine: EngineFacts, cluster: ClusterSettings) -> Sequence[Finding]:
    health = cluster.health
    if not health.active or health.path not in _GENERATING:
        return []
    try:
        took_s = (await engine.link.health_reply()).took_s
    except ClientError:
        return []
    if took_s * _MARGIN < health.timeout:
        return []
    what = f"its {health.path} generates a token: it took {took_s:.1f} s, and probes wait {health.timeout:g} s"
    fix = "set `health.path` of the cluster to /ready (older SGLangs: `health.timeout` to 5s)"
    return [warning(engine.where, what, fix)]


def _priority(engine: EngineFacts, cluster: ClusterSettings, info: SglangInfo) -> Iterator[Finding]:
    right = PriorityOrder.LOWEST_FIRST if info.schedule_low_priority_values_first else PriorityOrder.HIGHEST_FIRST
    mode = engine.endpoint.engine_priority or cluster.engine_priority
    if mode is EnginePriorityMode.OFF:
        if info.enable_priority_scheduling and _may_send_priority(engine, cluster):
            fix = (
                f"set `engine_priority: auto` and `engine_priority_order: {right.value}`, "
                "or `engine_priority: off` where clients send a `priority` of their own"
            )
            yield warning(engine.where, "admits requests by `priority`, and the proxy sends none", fix)
        return
    if info.enable_priority_scheduling is False:
        make = problem if mode is EnginePriorityMode.ON else warning
        fix = "start it with `--enable-priority-scheduling`, or set engine_priority to off"
        yield make(engine.where, "is not started with priority scheduling, and engine_priority is not off", fix)
        return
    order = engine.endpoint.engine_priority_order or cluster.engine_priority_order
    if order is not right:
        first = right.value.partition("_")[0]
        what = f"admits the {first} `priority` first, unlike engine_priority_order"
        yield problem(engine.where, what, f"set `engine_priority_order: {right.value}`")


def _may_send_priority(engine: EngineFacts, cluster: ClusterSettings) -> bool:
    """Return True if the policy can order requests and no `engine_priority` is written down."""
    written = "engine_priority" in cluster.model_fields_set | engine.endpoint.model_fields_set
    return cluster.policy in FORECASTING and not written


def _pages(engine: EngineFacts, info: SglangInfo) -> Iterator[Finding]:
    if info.disable_radix_cache:
        yield problem(engine.where, "reuses no prefixes", "start it without `--disable-radix-cache`")
    if engine.plan.follows is None:
        return
    if info.page_size is not None and info.page_size < _SMALL_PAGE:
        what = f"has pages of {info.page_size} token(s): a KV event for each"
        yield warning(engine.where, what, "start it with `--page-size 16` (or 32, 64), or set `kv_events: false`")


def _describe(info: SglangInfo) -> str:
    said = f"SGLang {info.version}".strip()
    if info.page_size is not None:
        said += f", pages of {info.page_size} token(s)"
    if info.pairs:
        said += f"; {info.speculative_algorithm} keys its cache by pairs of tokens: matched to within one page"
    return said


_STATE = "set `data_parallel: {ranks: [%s]}` of the endpoint"
_DO_NOT_STEER = "update the engine, or set `data_parallel: {steer: false}`"


@check("data-parallel ranks", calls=TRIAL_CALLS + MAX_TRIED)
async def check_ranks(engine: EngineFacts) -> Sequence[Finding]:
    """Send a request to each rank, and to one that there is not."""
    shown = await engine.shown_ranks()
    if not engine.data_parallel.steer:
        return [ok(engine.where, f"balances over its {len(shown)} data-parallel ranks by itself")] if shown else []
    answers = await engine.trials.try_ranks()
    if answers is None:
        return []
    named = await _named(engine)
    return [judge_ranks(engine.where, answers, stated=engine.data_parallel.ranks, shown=shown, named=named)]


async def _named(engine: EngineFacts) -> Collection[int]:
    """Return the ranks in its KV event sources; SGLang reports how many it has without any."""
    try:
        return range((await engine.sglang_info()).dp_size)
    except ClientError:
        return {source.dp_rank for source in await engine.sources_or_none()}


def judge_ranks(
    where: str, answers: RankAnswers, *, stated: Sequence[int], shown: Sequence[int], named: Collection[int]
) -> Finding:
    """Return the verdict: `stated` by the configuration, `shown` by metrics, `named` by event sources or arguments."""
    taken = _listed(sorted(answers.taken))
    if answers.refused:
        fix = _STATE % taken if taken else "set `data_parallel: {steer: false}`: it has none"
        return problem(where, f"has no data-parallel rank {_listed(answers.refused)}, which is configured", fix)
    if not answers.reads:
        what = "answers a request for a rank that it does not have: it does not read x-data-parallel-rank"
        return warning(where, what, _DO_NOT_STEER)
    if stated and set(shown) - set(stated):
        what = f"has the data-parallel ranks {_listed(shown)}, and the configuration names {_listed(sorted(stated))}"
        return warning(where, f"{what}: the others get no requests", _STATE % _listed(shown))
    if not stated and set(named) != set(shown):
        what = f"only its metrics show the data-parallel ranks {taken}: a prefix is computed once per rank"
        return warning(where, what, f"{_STATE % taken}, or start it with `--kv-events-config`")
    return ok(where, f"takes requests for each of its data-parallel ranks {taken}, and for no other one")


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


@check("cors", calls=2)
async def check_cors(engine: EngineFacts) -> Sequence[Finding]:
    """Send a preflight, where no `cors` filter is configured."""
    if not await engine.link.is_reachable():
        return []
    origins = await engine.link.allowed_origins()
    if not origins:
        return []
    what = (
        "answers browsers of other origins, and the proxy does not: pages cannot read its lists of models and its "
        "errors (401, 404, 429, 5xx)"
    )
    fix = "add the filter: `filters: {cors: {allow_origins: [...]}}`, and take `--allowed-origins` from the engine"
    return [warning(engine.where, what, fix)]
