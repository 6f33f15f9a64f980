"""Plain data into a model, with every problem at once in words a person can act on."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from kvproxy.config.fields import keys_of, model_at, nearest
from kvproxy.config.paths import Origins, Path, Where
from kvproxy.errors import Problem

M = TypeVar("M", bound=Any)

UNKNOWN_KEY = "unknown key"

_ROUNDS = 8
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


@dataclass(frozen=True, slots=True)
class Decoded(Generic[M]):
    """What could be decoded.

    `value` is best effort when there are problems: wrong parts have their defaults, or are missing, so that further
    checks can run on the rest. `moved` maps list positions of `value` back to those in the data.
    """

    value: M | None
    problems: list[Problem]
    moved: Origins


def decode(model: type[M], raw: Any, where: Where) -> Decoded[M]:
    """`raw` as `model`, and a problem for everything wrong with it."""
    problems: list[Problem] | None = None
    tree = copy.deepcopy(raw)
    kept: dict[Path, list[int]] = {}
    for _ in range(_ROUNDS):
        try:
            value = model.model_validate(tree)
        except ValidationError as error:
            details = error.errors(include_url=False)
            if problems is None:
                problems = [problem_of(model, detail, where) for detail in details]
            if not _cut_all(tree, details, kept):
                break
        else:
            moves = [((*at, new), (*at, old)) for at, olds in kept.items() for new, old in enumerate(olds)]
            return Decoded(value, problems or [], Origins(moves))
    return Decoded(None, problems or [], Origins())


def problem_of(model: type[Any], detail: ErrorDetails, where: Where) -> Problem:
    """One validation error in our words. Never quotes the value it is about."""
    path, kind = detail["loc"], detail["type"]
    if kind == "extra_forbidden":
        parent = model_at(model, path[:-1])
        hint = nearest(str(path[-1]), keys_of(parent)) if parent is not None else ""
        return Problem(where(path), UNKNOWN_KEY, hint)
    text = _TEXTS.get(kind)
    if text is None:
        text = detail["msg"].removeprefix("Value error, ").replace("Input should be", "must be", 1)
    return Problem(where(path), text, _nearest_choice(detail))


def _nearest_choice(detail: ErrorDetails) -> str:
    given = detail["input"]
    if detail["type"] not in ("enum", "literal_error") or not isinstance(given, str):
        return ""
    choices = str(detail["ctx"]["expected"]).replace(" or ", ", ").split(", ")
    hint = nearest(given, [choice.strip("'") for choice in choices])
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
        parent, at, here = here, (*at, part), following
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
