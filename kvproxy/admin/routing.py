"""How each cluster decides: its policy, what that has learned, and the parameters an operator may change meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvproxy.admin.operated import AdminTarget
from kvproxy.admin.replies import Audit, RequestRefused, read_json_object, reply
from kvproxy.cluster.cluster import Cluster
from kvproxy.config.model import Model
from kvproxy.config.paths import spelling_hint
from kvproxy.errors import ConfigError, Problem
from kvproxy.routing.policy import Policy
from kvproxy.routing.registry import ranges, tuned


def describe_routing(cluster: Cluster, now: float) -> dict[str, object]:
    """Policy, parameters with their ranges, what was learned, and the router queue (None: there is none)."""
    policy, settings, queue = cluster.policy, cluster.policy.settings, cluster.queue
    return {
        "policy": cluster.policy_name,
        "parameters": {} if settings is None else settings.model_dump(),
        "allowed": {} if settings is None else ranges(settings),
        "learned": policy.estimates(now),
        "adapters": cluster.adapters.estimates(),
        "queue": None if queue is None else queue.status(now),
    }


class RoutingRoutes:
    """Show and change. A change takes the shape of what is shown: `{"clusters": {NAME: {"parameters": {...}}}}`."""

    def __init__(self, operated: AdminTarget, audit: Audit) -> None:
        self._operated = operated
        self._audit = audit

    def routes(self) -> list[Route]:
        """Their paths."""
        return [Route("/routing", self._routing, methods=["GET", "PATCH"])]

    async def _routing(self, request: Request) -> Response:
        if request.method == "PATCH":
            self._change(request, await read_json_object(request))
        now = self._operated.clock()
        return reply({"clusters": {name: describe_routing(one, now) for name, one in self._operated.clusters.items()}})

    def _change(self, request: Request, body: dict[str, Any]) -> None:
        """All of it, or nothing."""
        problems: list[Problem] = []
        planned: list[tuple[str, Policy, Model, Model]] = []
        for name, changes in _wanted(body, problems):
            policy = self._find_policy(name, problems)
            if policy is None or policy.settings is None:
                continue
            try:
                planned.append((name, policy, policy.settings, tuned(policy.settings, changes)))
            except ConfigError as error:
                at = f"clusters.{name}.parameters"
                problems += [Problem(f"{at}.{one.path}", one.message, one.hint) for one in error.problems]
        if problems:
            raise RequestRefused(422, *problems)
        for name, policy, before, after in planned:
            policy.settings = after
            old, new = before.model_dump(), after.model_dump()
            changed = {key: {"before": old[key], "after": new[key]} for key in new if old[key] != new[key]}
            self._audit.write_line(request, "routing.change", cluster=name, parameters=changed)

    def _find_policy(self, name: str, problems: list[Problem]) -> Policy | None:
        """The cluster's own, where it has parameters."""
        cluster = self._operated.clusters.get(name)
        if cluster is None:
            fix = spelling_hint(name, self._operated.clusters)
            problems.append(Problem(f"clusters.{name[:128]}", "there is no such cluster", fix))
            return None
        if cluster.policy.settings is None:
            fix = "kv_aware, dynamo, dynamo_agentic, llm_d, llm_d_sticky and prefix_affinity have some"
            what = f"the policy {cluster.policy_name} has no parameters"
            problems.append(Problem(f"clusters.{name}.parameters", what, fix))
            return None
        return cluster.policy


def _wanted(body: dict[str, Any], problems: list[Problem]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Cluster names with their changes, as far as the shape is right."""
    problems += [Problem(key, "unknown key", spelling_hint(key, ["clusters"])) for key in body if key != "clusters"]
    clusters = body.get("clusters")
    if not isinstance(clusters, dict) or not clusters:
        problems.append(Problem("clusters", "names no cluster", '{"clusters": {"default": {"parameters": {...}}}}'))
        return
    for name, entry in clusters.items():
        at = f"clusters.{name[:128]}"
        if not isinstance(entry, dict) or not isinstance(entry.get("parameters"), dict) or not entry["parameters"]:
            problems.append(Problem(f"{at}.parameters", "required", "an object of parameters and their new values"))
            continue
        problems += [
            Problem(f"{at}.{key}", "cannot be changed here", "`parameters` can") for key in entry if key != "parameters"
        ]
        yield name, entry["parameters"]
