"""Are the engines registered at LMCache under the ids that their endpoints have?"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from kvproxy.doctor.checks.chat import TRIAL_CALLS
from kvproxy.doctor.engine import Engine
from kvproxy.doctor.finding import Finding, ok, problem, warning
from kvproxy.doctor.lmcache import LmCache
from kvproxy.doctor.site import Site, known
from kvproxy.errors import ClientError, NotSupported


@dataclass(frozen=True, slots=True)
class InstancesCheck:
    """All endpoints against all registered instances. `trial`: what is held for a prompt settles who is who."""

    site: Site
    lmcache: LmCache
    trial: bool = True

    name = "instance ids"
    calls = TRIAL_CALLS + 8

    @property
    def where(self) -> str:
        return self.lmcache.where

    async def find(self) -> Sequence[Finding]:
        await self.lmcache.kind()  # what is no LMCache is told elsewhere
        try:
            registered = await self.lmcache.instances()
        except NotSupported:
            fix = "upgrade LMCache's controller to 0.3.11 or newer"
            return [warning(self.where, "cannot list its instances, so their ids are not checked", fix)]
        except ClientError as error:
            return [problem(self.where, f"does not list its instances: {error}", "read LMCache's log")]
        strangers = [
            engine
            for engine in self.site.engines
            if engine.instance_id not in registered and (await engine.link()).error is None
        ]
        names: dict[Engine, str] = {}
        if self.trial and registered:
            found = await known(strangers, self.lmcache.found)
            names = {engine: one.holders[0] for engine, one in found.items() if len(one.holders) == 1}
        wanted = {engine.instance_id for engine in self.site.engines}
        return instance_findings(self.where, wanted, registered, strangers, names)


def instance_findings(
    where: str,
    wanted: Collection[str],
    registered: Collection[str],
    strangers: Sequence[Engine],
    names: Mapping[Engine, str],
) -> Sequence[Finding]:
    """`wanted`: the instance ids of all endpoints. `strangers`: engines that are up, but not registered by theirs.
    `names`: under which instance LMCache holds what an engine has just computed, where that is known."""
    if not registered:
        return [_nobody(where)]
    free = sorted(set(registered) - set(wanted) - set(names.values()))
    if strangers:
        return [_unregistered(engine, names.get(engine, ""), free) for engine in strangers]
    if free:
        what = f"no endpoint has the registered instance(s) {', '.join(free)}: what they hold is passed over"
        return [warning(where, what, "set `instance_id` of their endpoints, or stop engines that nobody uses")]
    return [ok(where, f"every endpoint that is up is registered ({', '.join(sorted(set(wanted) & set(registered)))})")]


def _nobody(where: str) -> Finding:
    causes = (
        "engines are not told: enable_controller, controller_pull_url and controller_reply_url (controller), or "
        "--coordinator-url (multi-process server)",
        "LMCache was restarted and engines send no heartbeats: set lmcache_worker_heartbeat_time, or restart them",
        "engines and LMCache are of versions that do not understand each other: use one version",
    )
    fix = "register the engines; see the causes"
    return problem(where, "no engine is registered at LMCache: every lookup will be empty", fix, causes)


def _unregistered(engine: Engine, name: str, free: Sequence[str]) -> Finding:
    own = engine.instance_id
    what = f"LMCache knows no instance {own!r}: lookups never lead to this endpoint"
    start = f"start its LMCache with the instance id {own} (LMCACHE_LMCACHE_INSTANCE_ID={own})"
    if name:
        return problem(
            engine.where, f"{what}; it holds the engine's prompts under {name!r}", f"set `instance_id: {name}`"
        )
    if free:
        return problem(engine.where, what, f"set `instance_id` to its own of {', '.join(free)}, or {start}")
    return problem(engine.where, what, f"{start}, and make sure that it reaches LMCache")
