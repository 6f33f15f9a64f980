"""The configuration file behind the proxy: how old what is in force is, and why a newer one is not."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

from kvproxy.operate.admin.findings import Rank, Trouble
from kvproxy.operate.runtime.operated import ConfigReloader


def describe_file(reloader: ConfigReloader | None, now: float) -> dict[str, object] | None:
    """Its name, for how long it has been in force, and whether a newer version was refused; None without a file."""
    if reloader is None or not reloader.file_name:
        return None
    return {
        "name": reloader.file_name,
        "loaded_s_ago": now - reloader.loaded_at,
        "refused": reloader.refusal is not None,
    }


def find_refused_file(reloader: ConfigReloader | None, now: float) -> Iterator[tuple[Trouble, float]]:
    """Yield a finding, with when the file was changed, while the file that was read last is not in force."""
    refusal = None if reloader is None else reloader.refusal
    if reloader is None or refusal is None:
        return
    first = refusal.errors[0]
    more = len(refusal.errors) - 1
    place = f"{first.line}:{first.column} " if first.line else ""
    rest = f", and {more} more" if more else ""
    what = (
        f"{reloader.file_name} changed {describe_age(now - refusal.changed_at)} ago and is not in force: "
        f"{place}{str(first) if first.path else first.message}{rest}"
    )
    fix = f"correct it, then `kvproxy reload`; `kvproxy check {reloader.file_name}` shows every problem"
    yield Trouble(("reload",), Rank.SOURCES, "problem", "configuration", what, fix), refusal.changed_at


def describe_age(seconds: float) -> str:
    """`40 min`, as the page has it."""
    age = timedelta(seconds=max(0.0, seconds))
    if age < timedelta(seconds=90):
        return f"{age.seconds} s"
    if age < timedelta(minutes=90):
        return f"{age // timedelta(minutes=1)} min"
    return f"{age // timedelta(hours=1)} h" if age < timedelta(days=2) else f"{age.days} days"
