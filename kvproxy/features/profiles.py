"""Workload profiles: defaults that measurements support for one kind of traffic (docs/profiles.md has the figures)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kvproxy.base.errors import Problem
from kvproxy.operate.config.schema import Profile
from kvproxy.operate.config.shorthand import Canonical


class ProfileDefault(NamedTuple):
    """One setting that is not the general default, and why."""

    section: str
    key: str
    value: Any
    reason: str


_BATCH_WAITS = "what is sent at once waits in the engines for longer than the 10 minutes that people would"

PROFILES: Mapping[Profile, tuple[ProfileDefault, ...]] = {
    **dict.fromkeys(Profile, ()),
    Profile.BATCH: (ProfileDefault("timeouts", "first_byte", "1h", _BATCH_WAITS),),
}


def apply_profile(form: Canonical) -> None:
    """Set what the file leaves open, and notes it. A profile that does not exist is left for the model to refuse."""
    name = form.data.get("profile")
    if not isinstance(name, str) or name not in Profile.__members__.values():
        return
    for default in PROFILES[Profile(name)]:
        form.data = _with_default(form, default, form.data)
    if not PROFILES[Profile(name)]:
        _note(form, "changes nothing: the general defaults are the best known for it")


def _with_default(form: Canonical, default: ProfileDefault, parent: dict[str, Any]) -> dict[str, Any]:
    """Return a copy with the setting, unless it is written."""
    written = parent.get(default.section, {})
    if not isinstance(written, dict) or default.key in written:
        _note(form, f"leaves {default.section} as it is written")
        return parent
    _note(form, f"sets {default.section}.{default.key} to {default.value}", default.reason)
    return {**parent, default.section: {**written, default.key: default.value}}


def _note(form: Canonical, said: str, reason: str = "") -> None:
    form.add_problem(Problem("profile", f"{form.data['profile']} {said}", reason, severity="note"))
