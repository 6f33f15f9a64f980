"""Which checks a site needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvproxy.doctor.check import Check
from kvproxy.doctor.checks.actions import ActionsCheck
from kvproxy.doctor.checks.caching import CachingCheck
from kvproxy.doctor.checks.chat import GenerateCheck, TokenizeCheck
from kvproxy.doctor.checks.chunks import ChunksCheck
from kvproxy.doctor.checks.clock import ClockCheck
from kvproxy.doctor.checks.configuration import ConfigurationCheck
from kvproxy.doctor.checks.connection import ConnectionCheck
from kvproxy.doctor.checks.duplicates import DuplicatesCheck
from kvproxy.doctor.checks.health import ApiCheck, HealthCheck
from kvproxy.doctor.checks.instances import InstancesCheck
from kvproxy.doctor.checks.kv_events import EventSourcesCheck, KvEventsCheck
from kvproxy.doctor.checks.limits import LimitsCheck
from kvproxy.doctor.checks.lmcache_service import ServiceCheck
from kvproxy.doctor.checks.lookup import BudgetCheck, LookupCheck
from kvproxy.doctor.checks.metrics import MetricsCheck
from kvproxy.doctor.checks.models import ModelsCheck
from kvproxy.doctor.checks.public import PublicCheck
from kvproxy.doctor.checks.tokenizers import TokenizerCheck, TokenizersCheck
from kvproxy.doctor.checks.versions import VersionCheck
from kvproxy.doctor.site import Site
from kvproxy.errors import Problem


def full(site: Site, problems: Sequence[Problem]) -> list[Check]:
    """Everything, with two requests of one token to each engine (a third where its KV events were silent)."""
    return [*_quiet(site, problems, trial=True), *_trials(site), *_lookups(site)]


def timed(site: Site) -> list[Check]:
    """What must run alone, after all the rest: it measures time."""
    if site.lmcache is None or not site.engines:
        return []
    return [BudgetCheck(site.engines, site.lmcache)]


def light(site: Site, problems: Sequence[Problem] = ()) -> list[Check]:
    """What can be asked without generating anything."""
    return list(_quiet(site, problems, trial=False))


def _quiet(site: Site, problems: Sequence[Problem], *, trial: bool) -> Iterator[Check]:
    wall_clock, lmcache = site.tools.wall_clock, site.lmcache
    yield ConfigurationCheck(problems, site.undiscovered)
    yield LimitsCheck(site)
    yield PublicCheck(site.config)
    for engine in (*site.engines, *filter(None, [site.tokenizer])):
        yield ConnectionCheck(engine.where, engine.origin, engine.link, wall_clock)
        yield ApiCheck(engine)
    for engine in site.engines:
        yield HealthCheck(engine)
        yield MetricsCheck(engine)
        yield EventSourcesCheck(engine, _wants_events(site))
        yield ClockCheck(engine, trial)
    for name, engines in site.clusters():
        if engines:
            yield ModelsCheck(site, name)
            yield VersionCheck(site, name)
    if lmcache is not None:
        yield ConnectionCheck(lmcache.where, lmcache.origin, lmcache.link, wall_clock)
        yield ServiceCheck(lmcache)
        yield InstancesCheck(site, lmcache, trial)
        yield ActionsCheck(lmcache)


def _trials(site: Site) -> Iterator[Check]:
    needed = (site.lmcache is not None or _wants_events(site)) and site.tokenizer is None
    for engine in site.engines:
        yield GenerateCheck(engine)
        yield TokenizeCheck(engine, needed)
        yield CachingCheck(engine)
        yield KvEventsCheck(engine)
    for name, engines in site.clusters():
        if engines:
            yield TokenizersCheck(site, name)
    if site.tokenizer is not None:
        yield TokenizerCheck(site.tokenizer)
    yield DuplicatesCheck(site)


def _lookups(site: Site) -> Iterator[Check]:
    if site.lmcache is None:
        return
    for engine in site.engines:
        yield LookupCheck(engine, site.lmcache)
        yield ChunksCheck(engine, site.lmcache)


def _wants_events(site: Site) -> bool:
    return site.kvcache is not None and site.kvcache.kv_events
