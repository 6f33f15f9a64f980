"""The differences of two configurations, in one line of the log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvproxy.base.settings.model import Model

#: Names in one log line; for more changes the line gives the number.
_NAMED = 8


def summarise_changes(before: Model, after: Model) -> str:
    """`clusters.default.policy, clusters.default.endpoints (+c, -b)`; "nothing changed" when they are equal."""
    found = list(_changes("", before, after))
    if not found:
        return "nothing changed"
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return ", ".join(found[:_NAMED]) + more


def _changes(path: str, before: Any, after: Any) -> Iterator[str]:
    if before == after:
        return
    if isinstance(before, Model) and type(before) is type(after):
        for name in type(before).model_fields:
            yield from _changes(_under(path, name), getattr(before, name), getattr(after, name))
    elif isinstance(before, Mapping) and isinstance(after, Mapping):
        for name in dict.fromkeys([*before, *after]):
            if name in before and name in after:
                yield from _changes(_under(path, str(name)), before[name], after[name])
            else:
                yield f"{_under(path, str(name))} ({'removed' if name in before else 'added'})"
    elif isinstance(before, tuple) and isinstance(after, tuple) and (names := _named(before, after)) is not None:
        yield from _members(path, *names)
    else:
        yield path


def _named(before: tuple[Any, ...], after: tuple[Any, ...]) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Both by the ids or names of their members, where all have one of their own."""
    both = []
    for members in (before, after):
        by_name = {str(getattr(one, "id", "") or getattr(one, "name", "")): one for one in members}
        if "" in by_name or len(by_name) != len(members):
            return None
        both.append(by_name)
    return both[0], both[1]


def _members(path: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    signs = [f"+{name}" for name in after if name not in before] + [f"-{name}" for name in before if name not in after]
    if signs:
        yield f"{path} ({', '.join(signs[:_NAMED])})"
    kept = [name for name in before if name in after]
    if not signs and kept != list(after):
        yield f"{path} (order)"
    for name in kept:
        yield from _changes(_under(path, name), before[name], after[name])


def _under(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
