"""Plain data into a model, with every problem at once in words a person can act on.

pydantic stops at a wrong part: what lies around it is not checked further, and there is no value for the checks across
sections. So a wrong part is cut out of the data, where its default (or nothing) then stands, and the rest is validated
again until nothing is wrong. Only the first round is reported: later ones would speak of what the cuts left behind.
List positions that moved by a cut are kept, so that messages name those of the file.
"""

from __future__ import annotations

import copy
import difflib
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Generic, TypeVar, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from kvproxy.base.errors import Problem
from kvproxy.base.settings.model import Model
from kvproxy.base.settings.paths import Path, Place, Where, dotted_path
from kvproxy.operate.config.yaml_text import Substituted

M = TypeVar("M", bound=Any)

UNKNOWN_KEY = "unknown key"

#: Removing a wrong part may reveal a problem it hid, such as an unknown key. Deeper problems are not searched for.
_ROUNDS = 8
_MAX_SHOWN = 40
_NOT_A_MAPPING = {"model_type", "model_attributes_type", "dict_type", "mapping_type"}
_TEXTS = {
    "missing": "required",
    "string_type": "must be text (put it in quotes)",
    "model_type": "must be a mapping of settings",
    "model_attributes_type": "must be a mapping of settings",
    "dict_type": "must be a mapping",
    "mapping_type": "must be a mapping",
    "tuple_type": "must be a list",
    "list_type": "must be a list",
    "string_pattern_mismatch": "must start with a letter or digit and contain only letters, digits and . _ : / @ -",
    "string_too_short": "must not be empty",
    "invalid_key": "a key must be text",
}
#: Pydantic messages that continue with the value; none of these settings is a secret.
_TEXTS_WITH_VALUE = {
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "int_parsing": "must be a whole number",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "int_parsing_size": "must be a whole number of a usual size",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
}
#: Last parts of error paths that name a type instead of a setting.
_KINDS = {"constrained-int", "constrained-str", "int", "str", "float", "bool"}
_SHOWING_VALUE = {"enum", "literal_error", "greater_than", "greater_than_equal", "less_than", "less_than_equal"}


@dataclass(frozen=True, slots=True)
class Decoded(Generic[M]):
    """Result of decoding.

    `value` is best effort when there are problems: wrong parts have their defaults, or are missing, so that further
    checks can run on the rest. `moved` maps list positions of `value` back to those in the data."""

    value: M | None
    problems: list[Problem]
    moved: Origins


def decode_model(model: type[M], raw: Any, where: Where) -> Decoded[M]:
    """`raw` as `model`, and a problem for everything wrong with it."""
    tree = copy.deepcopy(raw)
    kept: dict[Path, list[int]] = {}
    wrong = _loose_booleans(model, tree) if issubclass(model, Model) else {}
    problems: list[Problem] = []
    for path, given in wrong.items():
        problems.append(Problem(where(path), f"must be true or false, not {_shown(given)}"))
        _cut(tree, path, emptied=False, kept=kept)
    for number in range(_ROUNDS):
        try:
            value = model.model_validate(tree)
        except ValidationError as error:
            details = _fold_choices(error.errors(include_url=False))
            if number == 0:
                problems += [describe_problem(model, _as_written(detail, raw), where) for detail in details]
            if not _cut_all(tree, details, kept):
                break
        else:
            moves = [((*at, new), (*at, old)) for at, olds in kept.items() for new, old in enumerate(olds)]
            return Decoded(value, problems, Origins(moves))
    return Decoded(None, problems, Origins())


def _loose_booleans(model: type[Model], tree: Any) -> dict[Path, Any]:
    """Return what pydantic would take for a boolean and YAML does not: yes, on, 1 and their like.

    A shell's words for one are fine in a value from the environment.
    """
    found: dict[Path, Any] = {}

    def look(annotation: Any, value: Any, path: Path) -> None:
        kind = bare_type(annotation)
        if kind is bool:
            fine = value is None or isinstance(value, bool | Substituted) or str(value).casefold() in ("true", "false")
            if not fine:
                found[path] = value
        elif isinstance(kind, type) and issubclass(kind, Model) and isinstance(value, dict):
            for name, field in kind.model_fields.items():
                key = field.alias or name
                if key in value:
                    look(field.annotation, value[key], (*path, key))
        elif get_origin(kind) is tuple and isinstance(value, list):
            for index, item in enumerate(value):
                look(get_args(kind)[0], item, (*path, index))
        elif isinstance(value, dict) and len(get_args(kind)) == 2:
            for key, item in value.items():
                look(get_args(kind)[1], item, (*path, key))

    look(model, tree, ())
    return found


def describe_problem(model: type[Any], detail: ErrorDetails, where: Where) -> Problem:
    """One validation error in our words. Shows the value only where it cannot be a secret."""
    path = detail["loc"]
    kind = detail["type"]
    given = detail["input"]
    if kind == "extra_forbidden":
        return _unknown_key(model, path, where)
    if given is None and kind != "missing":
        return Problem(where(path), "has no value", "give it one, or leave the key out")
    text = _TEXTS.get(kind)
    if text is None:
        text = _TEXTS_WITH_VALUE.get(kind) or detail["msg"].removeprefix("Value error, ")
        text = text.replace("Input should be", "must be", 1)
        if kind in _TEXTS_WITH_VALUE or kind in _SHOWING_VALUE:
            text += f", not {_shown(given)}"
    return Problem(where(path), text, _nearest_choice(detail))


def _fold_choices(details: Sequence[ErrorDetails]) -> list[ErrorDetails]:
    """One problem for a value that is none of the kinds its setting takes; pydantic has one for each kind, at a path
    that ends with the kind's own name."""
    folded: list[ErrorDetails] = []
    for detail in details:
        last = detail["loc"][-1] if detail["loc"] else ""
        if not isinstance(last, str) or not (last in _KINDS or last.startswith("literal[")):
            folded.append(detail)
            continue
        path = detail["loc"][:-1]
        same = next((one for one in folded if one["loc"] == path), None)
        if same is None:
            folded.append({**detail, "loc": path})
        else:
            whole = _TEXTS_WITH_VALUE.get(same["type"]) or same["msg"]
            other = re.sub("^Input should be ", "", detail["msg"])
            merged: ErrorDetails = {
                **same,
                "type": "value_error",
                "msg": f"{whole} or {other}, not {_shown(same['input'])}",
            }
            folded[folded.index(same)] = merged
    return folded


def _as_written(detail: ErrorDetails, raw: Any) -> ErrorDetails:
    """With the value as the file has it: a bound is checked on the number that `2d` was read as."""
    here = raw
    for part in detail["loc"]:
        try:
            here = here[part]
        except (KeyError, IndexError, TypeError):
            return detail
    return {**detail, "input": here} if isinstance(here, int | float | str) else detail


def _unknown_key(model: type[Any], path: Path, where: Where) -> Problem:
    parent = model_at(model, path[:-1])
    for kind in () if parent is None else parent.__mro__:
        if reason := vars(kind).get("retired", {}).get(path[-1]):
            return Problem(where(path), "ignored: no longer a setting", f"leave it out: {reason}", severity="warning")
    known = keys_of(parent) if parent is not None else []
    meant = closest_word(str(path[-1]), known)
    return Problem(
        where(path), UNKNOWN_KEY, spelling_hint(str(path[-1]), known), meant=where((*path[:-1], meant)) if meant else ""
    )


def _shown(given: Any) -> str:
    """Return the value as the file has it, cut short; one from the environment is not shown."""
    if isinstance(given, dict | list):
        return "a mapping" if isinstance(given, dict) else "a list"
    if isinstance(given, bool):
        return str(given).lower()
    text = repr(given) if isinstance(given, str) else str(given)
    return text if len(text) <= _MAX_SHOWN or isinstance(given, Substituted) else f"{text[:_MAX_SHOWN]}..."


def _nearest_choice(detail: ErrorDetails) -> str:
    given = detail["input"]
    if detail["type"] not in ("enum", "literal_error") or not isinstance(given, str) or isinstance(given, Substituted):
        return ""
    choices = [choice.strip("'") for choice in str(detail["ctx"]["expected"]).replace(" or ", ", ").split(", ")]
    alias = POLICY_ALIASES.get(re.sub(r"[^a-z0-9]", "", given.casefold()))
    if alias in choices:
        return f"did you mean {str(alias)!r}?"
    hint = spelling_hint(given, choices)
    return hint if hint.startswith("did") else ""


def _cut_all(tree: Any, details: Sequence[ErrorDetails], kept: dict[Path, list[int]]) -> bool:
    """Take the wrong parts out, last list positions first. False when nothing can be taken out."""
    cuts = {detail["loc"][:-1] if detail["type"] == "missing" else detail["loc"]: detail["type"] for detail in details}
    done = False
    for path in sorted(cuts, key=lambda loc: [(isinstance(part, str), part) for part in loc], reverse=True):
        done = _cut(tree, path, emptied=cuts[path] in _NOT_A_MAPPING, kept=kept) or done
    return done


def _cut(tree: Any, path: Path, *, emptied: bool, kept: dict[Path, list[int]]) -> bool:
    """Remove what stands at `path`, or the nearest thing around it; a mapping written as something else is emptied."""
    parent: Any = None
    at: Path = ()
    here = tree
    for part in path:
        try:
            following = here[part]
        except (KeyError, IndexError, TypeError):
            break
        parent = here
        at = (*at, part)
        here = following
    if isinstance(parent, dict):
        if emptied and here != {}:
            parent[at[-1]] = {}
        else:
            del parent[at[-1]]
        return True
    if isinstance(parent, list) and isinstance(at[-1], int):
        kept.setdefault(at[:-1], list(range(len(parent)))).pop(at[-1])
        parent.pop(at[-1])
        return True
    return False


#: Name in other routers, letters and digits only: our policy.
POLICY_ALIASES = {
    "rr": "round_robin",
    "roundrobin": "round_robin",
    "leastconn": "least_request",
    "leastconnection": "least_request",
    "leastconnections": "least_request",
    "leastloaded": "least_request",
    "leastload": "least_request",
    "leastrequests": "least_request",
    "leastbusy": "least_request",
    "p2c": "power_of_two",
    "poweroftwochoices": "power_of_two",
    "ringhash": "consistent_hash",
    "maglev": "consistent_hash",
    "hash": "consistent_hash",
    "sticky": "session",
    "stickysession": "session",
    "kvaware": "kv_aware",
    "kvcacheaware": "kv_aware",
    "kv": "kv_aware",
    "precise": "kv_aware",
    "cacheaware": "prefix_affinity",
    "prefixaware": "prefix_affinity",
    "prefixcache": "prefix_affinity",
    "prefix": "prefix_affinity",
}


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


def is_inside(path: str, outer: str) -> bool:
    """Return True if a dotted path is `outer` or lies below it."""
    return not outer or path == outer or (path.startswith(outer) and path[len(outer)] in ".[")


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
