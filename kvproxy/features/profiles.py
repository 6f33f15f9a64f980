"""Workload profiles: defaults that measurements support for one kind of traffic (docs/profiles.md has the figures)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kvproxy.base.errors import Problem
from kvproxy.operate.config.schema import Profile
from kvproxy.operate.config.shorthand import Canonical
from kvproxy.operate.config.verify_clusters import FORECASTING


class ProfileDefault(NamedTuple):
    """One setting that is not the general default, and why. The section is one of each cluster, or of the file."""

    section: str
    key: str
    value: Any
    reason: str
    of_cluster: bool = False


def _queue(measured: str) -> tuple[ProfileDefault, ...]:
    reason = f"it makes the mean time to first token {measured} of that without"
    return (ProfileDefault("queue", "enabled", True, reason, of_cluster=True),)


_BATCH_WAITS = "what is sent at once waits in the engines for longer than the 10 minutes that people would"

PROFILES: Mapping[Profile, tuple[ProfileDefault, ...]] = {
    Profile.CHAT: (),
    Profile.CODE: _queue("0.97"),
    Profile.AGENT: _queue("0.89 to 1.00"),
    Profile.RAG: _queue("0.60 to 0.78"),
    Profile.SUMMARIZATION: (),
    Profile.BATCH: (ProfileDefault("timeouts", "first_byte", "1h", _BATCH_WAITS),),
}


def apply_profile(form: Canonical) -> None:
    """Sets what the file leaves open, and notes it. A profile that does not exist is left for the model to refuse."""
    name = form.data.get("profile")
    if not isinstance(name, str) or name not in Profile.__members__.values():
        return
    for default in PROFILES[Profile(name)]:
        if default.of_cluster:
            clusters = form.data["clusters"]
            form.data["clusters"] = {key: _of_cluster(form, default, key, each) for key, each in clusters.items()}
        else:
            form.data = _with_default(form, default, form.data, "")
    if not PROFILES[Profile(name)]:
        _note(form, "changes nothing: the general defaults are the best known for it")


def _of_cluster(form: Canonical, default: ProfileDefault, name: str, cluster: Any) -> Any:
    if not isinstance(cluster, dict) or cluster.get("policy", "kv_aware") not in FORECASTING:
        return cluster
    return _with_default(form, default, cluster, f"clusters.{name}.")


def _with_default(form: Canonical, default: ProfileDefault, parent: dict[str, Any], path: str) -> dict[str, Any]:
    """A copy with the setting, unless it is written. A cluster's section that is written at all is all its own."""
    written = parent.get(default.section, {})
    if not isinstance(written, dict) or default.key in written or (default.of_cluster and default.section in parent):
        _note(form, f"leaves {path}{default.section} as it is written")
        return parent
    value = default.value if isinstance(default.value, str) else str(default.value).lower()
    _note(form, f"sets {path}{default.section}.{default.key} to {value}", default.reason)
    return {**parent, default.section: {**written, default.key: default.value}}


def _note(form: Canonical, said: str, reason: str = "") -> None:
    form.add_problem(Problem("profile", f"{form.data['profile']} {said}", reason, severity="note"))
