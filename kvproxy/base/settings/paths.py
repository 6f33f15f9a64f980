"""Paths in a configuration: where something was written, what may stand there, what is wrong or differs there."""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path as FilePath
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin

from kvproxy.base.errors import Problem, Severity
from kvproxy.base.settings.model import Model

Path = tuple[str | int, ...]

#: Dotted text of a path, as its file shows it.
Where = Callable[[Path], str]


def dotted_path(path: Path) -> str:
    """`clusters.default.endpoints[0].url`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


def is_inside(path: str, outer: str) -> bool:
    """Return True if a dotted path is `outer` or lies below it."""
    return not outer or path == outer or (path.startswith(outer) and path[len(outer)] in ".[")


class Origins:
    """Written paths of canonical ones, by longest known prefix: shorthands move values, messages must not."""

    def __init__(self, moves: Iterable[tuple[Path, Path]] = ()) -> None:
        self._written = dict(moves)

    def add_move(self, canonical: Path, written: Path) -> None:
        """Record that the value now at `canonical` was written at `written`."""
        self._written[canonical] = written

    def find_written(self, canonical: Path) -> Path:
        """Where it was written; the same path where nothing moved."""
        for length in range(len(canonical), -1, -1):
            written = self._written.get(canonical[:length])
            if written is not None:
                return written + canonical[length:]
        return canonical

    def __call__(self, canonical: Path) -> str:
        return dotted_path(self.find_written(canonical))


_BOUNDARY = re.compile(r"[.\[]")
#: Keys may contain dots; for a key with more dots only its parent is found.
_MAX_DOTS = 32


@dataclass(slots=True)
class Place:
    """A value's line and column (from 1) and the places of its parts: by key, or by `[index]`."""

    line: int = 0
    column: int = 0
    below: dict[str, Place] = field(default_factory=dict)

    def find_place(self, path: str) -> Place:
        """Return the place of a dotted path, else of its nearest parent that was written."""
        here = self
        while path:
            end = here._longest_key(path)
            if not end:
                break
            here = here.below[path[:end]]
            path = path[end:].removeprefix(".")
        return here

    def _longest_key(self, path: str) -> int:
        if path in self.below:
            return len(path)
        ends = [match.start() for match in islice(_BOUNDARY.finditer(path, 1), _MAX_DOTS)]
        return next((end for end in reversed(ends) if path[:end] in self.below), 0)


def sort_in_file_order(problems: Iterable[Problem], root: Place) -> list[Problem]:
    """Return the problems with their lines and columns, from the top of the file to its end."""
    placed = []
    for problem in problems:
        if not problem.line:
            place = root.find_place(problem.path)
            problem = replace(problem, line=place.line, column=place.column)
        placed.append(problem)
    return sorted(placed, key=lambda one: (one.line, one.column))


def bare_type(annotation: Any) -> Any:
    """Return the type without `Annotated` and without `| None`."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return bare_type(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        some = [arg for arg in get_args(annotation) if arg is not types.NoneType]
        return bare_type(some[0]) if len(some) == 1 else annotation
    return annotation


def model_at(model: type[Model], path: Path) -> type[Model] | None:
    """Return the model that describes what stands at `path` below `model`, if one does."""
    current: Any = model
    for part in path:
        current = bare_type(current)
        if isinstance(current, type) and issubclass(current, Model):
            field = next((f for name, f in current.model_fields.items() if part in (f.alias or name, name)), None)
            current = field.annotation if field is not None else None
        elif get_origin(current) is not None and issubclass(get_origin(current), Mapping):
            current = get_args(current)[1]
        elif get_origin(current) is tuple:
            current = get_args(current)[0]
        else:
            return None
    current = bare_type(current)
    return current if isinstance(current, type) and issubclass(current, Model) else None


def keys_of(model: type[Model]) -> list[str]:
    """Return the keys a file may give for this model."""
    return [field.alias or name for name, field in model.model_fields.items()]


def closest_word(wrong: str, known: Iterable[str]) -> str | None:
    """Return the known word that was probably meant."""
    folded = {word.casefold().replace("-", "_"): word for word in known}
    matches = difflib.get_close_matches(wrong.casefold().replace("-", "_"), folded, n=1, cutoff=0.6)
    return folded[matches[0]] if matches else None


def spelling_hint(wrong: str, known: Iterable[str]) -> str:
    """Return a hint that names the closest known word, else all of them if they are few."""
    known = sorted(known)
    close = closest_word(wrong, known)
    if close is not None:
        return f"did you mean {close!r}?"
    return f"known: {', '.join(known)}" if 0 < len(known) <= 40 else ""


class Finding(NamedTuple):
    """A problem at a path of the model."""

    path: Path
    message: str
    hint: str
    severity: Severity
    absence: bool = False
    """Reports a missing part below the path, which is untrue if that part was only wrong."""
    follows: tuple[Path, ...] = ()
    """Other settings it depends on: not reported if one of them is wrong itself."""


def error_at(
    path: Path, message: str, hint: str = "", *, absence: bool = False, follows: tuple[Path, ...] = ()
) -> Finding:
    """Refuses the configuration."""
    return Finding(path, message, hint, "error", absence, follows)


def warning_at(path: Path, message: str, hint: str = "", *, follows: tuple[Path, ...] = ()) -> Finding:
    """Usable, but probably not what was meant."""
    return Finding(path, message, hint, "warning", False, follows)


def missing_file(path: Path, name: str) -> Iterator[Finding]:
    """Yield an error when `name` is no file."""
    if not FilePath(name).is_file():
        yield error_at(path, f"no such file: {name!r}")


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
