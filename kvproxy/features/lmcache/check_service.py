"""Checks of LMCache: reachable, with the engines registered under the ids of their endpoints, and with the functions
that strategies need."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from kvproxy.base.errors import BadResponse, ClientError, NotSupported
from kvproxy.features.lmcache.service_facts import LmcacheFacts
from kvproxy.features.lmcache.settings import ServiceKind, StrategySettings, strategy_of
from kvproxy.operate.doctor.check_trial import TRIAL_CALLS
from kvproxy.operate.doctor.deployment import Deployment, gather_facts
from kvproxy.operate.doctor.engine import EngineFacts
from kvproxy.operate.doctor.report import Finding, check, ok, problem, warning

_LOCATIONS = ("LocalCPUBackend", "LocalDiskBackend")


@check("lmcache", calls=4)
async def check_service(lmcache: LmcacheFacts) -> Sequence[Finding]:
    """Check that it is the controller or the coordinator."""
    if (await lmcache.try_link()).error is not None:
        return []
    try:
        kind = await lmcache.find_kind()
    except BadResponse:
        fix = "correct `lmcache_endpoint`: the controller's own port (9000), or the coordinator's (9300)"
        return [problem(lmcache.where, "answers, but is neither LMCache's controller nor its coordinator", fix)]
    except ClientError as error:
        return [problem(lmcache.where, f"connects, but does not answer: {error}", "restart it; read its log")]
    configured = lmcache.settings.provider
    if configured not in (ServiceKind.AUTO, kind):
        fix = f"set `provider: {kind}` (or auto), or correct `lmcache_endpoint`"
        return [problem(lmcache.where, f"is a {kind}, not the {configured} in `provider`", fix)]
    return [ok(lmcache.where, f"LMCache's {kind} answers")]


@check("instance ids", calls=TRIAL_CALLS + 8)
async def check_instances(lmcache: LmcacheFacts, deployment: Deployment, *, trial: bool) -> Sequence[Finding]:
    """Compare all endpoints with all registered instances. `trial`: what is held for a prompt identifies an engine."""
    await lmcache.find_kind()  # a server that is no LMCache is reported elsewhere
    try:
        registered = await lmcache.list_instances()
    except NotSupported:
        fix = "upgrade LMCache's controller to 0.3.11 or newer"
        return [warning(lmcache.where, "cannot list its instances, so their ids are not checked", fix)]
    except ClientError as error:
        return [problem(lmcache.where, f"does not list its instances: {error}", "read LMCache's log")]
    unregistered = [
        engine
        for engine in deployment.engines
        if engine.instance_id not in registered and await engine.link.is_reachable()
    ]
    names: dict[EngineFacts, str] = {}
    if trial and registered:
        found = await gather_facts(unregistered, lmcache.find_holders)
        names = {engine: one.holders[0] for engine, one in found.items() if len(one.holders) == 1}
    wanted = {engine.instance_id for engine in deployment.engines}
    return judge_instances(lmcache.where, wanted, registered, unregistered, names)


def judge_instances(
    where: str,
    wanted: Collection[str],
    registered: Collection[str],
    unregistered: Sequence[EngineFacts],
    names: Mapping[EngineFacts, str],
) -> Sequence[Finding]:
    """`wanted`: the instance ids of all endpoints. `unregistered`: engines that are up, but not registered by theirs.
    `names`: under which instance LMCache holds what an engine has just computed, where that is known."""
    if not registered:
        return [_none_registered(where)]
    free = sorted(set(registered) - set(wanted) - set(names.values()))
    if unregistered:
        return [_unregistered(engine, names.get(engine, ""), free) for engine in unregistered]
    if free:
        what = f"no endpoint has the registered instance(s) {', '.join(free)}: their entries are ignored"
        return [warning(where, what, "set `instance_id` of their endpoints, or stop engines that are not used")]
    return [ok(where, f"every endpoint that is up is registered ({', '.join(sorted(set(wanted) & set(registered)))})")]


def _none_registered(where: str) -> Finding:
    causes = (
        "engines are not configured: enable_controller, controller_pull_url and controller_reply_url (controller), or "
        "--coordinator-url (multi-process server)",
        "LMCache was restarted and engines send no heartbeats: set lmcache_worker_heartbeat_time, or restart them",
        "engines and LMCache have incompatible versions: use one version",
    )
    fix = "register the engines; see the causes"
    return problem(where, "no engine is registered at LMCache: every lookup will be empty", fix, causes)


def _unregistered(engine: EngineFacts, name: str, free: Sequence[str]) -> Finding:
    own = engine.instance_id
    what = f"LMCache has no instance {own!r}: lookups never lead to this endpoint"
    start = f"start its LMCache with the instance id {own} (LMCACHE_LMCACHE_INSTANCE_ID={own})"
    if name:
        return problem(
            engine.where, f"{what}; it holds the engine's prompts under {name!r}", f"set `instance_id: {name}`"
        )
    if free:
        return problem(engine.where, what, f"set `instance_id` to its own of {', '.join(free)}, or {start}")
    return problem(engine.where, what, f"{start}, and make sure that it reaches LMCache")


@check("actions", calls=5)
async def check_actions(lmcache: LmcacheFacts) -> Sequence[Finding]:
    """Compare the strategies with the routes that this service has."""
    strategy = strategy_of(lmcache.settings)
    return await _judge_strategies(lmcache, strategy) if strategy.enabled else ()


async def _judge_strategies(lmcache: LmcacheFacts, strategy: StrategySettings) -> Sequence[Finding]:
    kind = await lmcache.find_kind()
    found: list[Finding] = []
    if kind is ServiceKind.CONTROLLER:
        evicts = not strategy.enable_eviction or await lmcache.has_evict_route()
        found += judge_strategies(lmcache.where, strategy, evicts=evicts)
    elif strategy.enable_compression:
        fix = "set `enable_compression: false`"
        found.append(warning(lmcache.where, "the coordinator has no compression: that strategy does nothing", fix))
    return found or [ok(lmcache.where, "supports the strategies")]


def judge_strategies(where: str, strategy: StrategySettings, *, evicts: bool) -> Iterator[Finding]:
    """Yield what a controller cannot do of it."""
    if strategy.enable_eviction and not evicts and not strategy.allow_clear:
        fix = "set `allow_clear: true` to clear whole locations instead, use the coordinator, or leave eviction off"
        yield warning(where, "has no /evict (no LMCache controller has): eviction does nothing", fix)
    for enabled, name in (
        (strategy.enable_pinning, "pin_location"),
        (strategy.enable_compression, "compress_location"),
        (strategy.enable_eviction and strategy.allow_clear, "evict_location"),
    ):
        location = getattr(strategy, name)
        if enabled and location not in _LOCATIONS:
            what = f"has no location {location!r} (`{name}`): the action answers 200 and does nothing"
            yield warning(where, what, f"set `{name}` to {' or '.join(_LOCATIONS)}")
