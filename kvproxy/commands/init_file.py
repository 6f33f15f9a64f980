"""The configuration that `kvproxy init` writes. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from kvproxy.commands.init_probe import Seen, SeenLmCache
from kvproxy.config.addresses import split_address

_HEAD = """\
# Written by `kvproxy init`. Every setting: docs/configuration.md. After a change: kvproxy check
"""


def config_text(seen: Sequence[Seen], lmcache: SeenLmCache | None, *, listen: str) -> str:
    """One cluster for engines that serve the same models; else one for each, with routes by model."""
    clusters = _clusters(seen)
    lines = [_HEAD + f"listen: {json.dumps(listen)}", f"admin: 127.0.0.1:{_admin_port(listen)}    # the live page", ""]
    if len(clusters) == 1:
        lines += ["policy: kv_aware", *_endpoints(seen, "")]
    else:
        lines.append("clusters:")
        for name, members in clusters.items():
            lines += [f"  {name}:    # {_model(members)}", "    policy: kv_aware", *_endpoints(members, "    ")]
        lines += ["", "routes:"]
        lines += [
            f"  - {{model: {json.dumps(model)}, cluster: {name}}}"
            for name, members in clusters.items()
            for model in dict.fromkeys(model for one in members for model in one.models)
        ]
    if lmcache is not None:
        lines += _filters(lmcache)
    return "\n".join(lines) + "\n"


def _clusters(seen: Sequence[Seen]) -> dict[str, list[Seen]]:
    """By the models they serve; engines that said nothing go with the first."""
    groups: dict[frozenset[str], list[Seen]] = {}
    for one in seen:
        if one.models:
            groups.setdefault(frozenset(one.models), []).append(one)
    silent = [one for one in seen if not one.models]
    members = list(groups.values()) or [[]]
    members[0] = [*members[0], *silent]
    names: dict[str, list[Seen]] = {}
    for number, group in enumerate(members, start=1):
        slug = re.sub(r"[^a-z0-9]+", "-", _model(group).rpartition("/")[2].casefold()).strip("-")[:40]
        name = slug or f"cluster-{number}"
        names[f"{name}-{number}" if name in names else name] = group
    return names


def _model(members: Sequence[Seen]) -> str:
    return next((model for one in members for model in one.models), "")


def _endpoints(members: Sequence[Seen], indent: str) -> Iterator[str]:
    paths = {one.health_path for one in members if one.models}
    if paths and paths != {"/health"}:
        yield f"{indent}health: {{path: /v1/models}}    # there is no /health"
    yield f"{indent}endpoints:"
    for one in members:
        yield f"{indent}  {json.dumps(one.id) if not one.id[0].isalpha() else one.id}: {json.dumps(one.url)}"


def _filters(lmcache: SeenLmCache) -> list[str]:
    return [
        "",
        "filters:",
        "  - request_id",
        "  - access_log",
        "  - inference_request",
        f"  - kvcache: {{lmcache_endpoint: {json.dumps(lmcache.url)}}}",
        "  - router",
    ]


def _admin_port(listen: str) -> int:
    """The next one; 8889 where the listener's port is not known; a free one beside a free one."""
    try:
        port = split_address(listen)[1]
    except ValueError:
        return 8889
    return port + 1 if 0 < port < 65535 else 0 if port == 0 else 8889
