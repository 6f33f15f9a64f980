"""YAML text to plain data: YAML 1.2's scalars, text keys, anchors and merges within bounds, every duplicate key named;
then `${VAR}`, `${VAR:-default}` and `$$` in its values.

Only `true` and `false` are booleans and only decimal, `0x` and `0o` numbers are integers, so `no`, `22:22` and
dates stay the text they look like. Placeholders are replaced after parsing: a value can never add keys or change the
file's structure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml
from yaml.resolver import Resolver

from kvproxy.base.errors import Problem
from kvproxy.base.settings.paths import Path, Place, Where

#: Bounds on what text and its aliases may expand to, so that a few lines cannot become gigabytes.
_MAX_NODES = 200_000
_MAX_DEPTH = 64

_TAG = "tag:yaml.org,2002:"
_NULL = re.compile(r"~|null|Null|NULL|")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]{1,300}|0x[0-9a-fA-F]{1,300}|0o[0-7]{1,300}")  # int() refuses thousands of digits
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")


class _Composer(yaml.SafeLoader):
    """Composes nodes only; scalars keep the tag `str` and are read by `plain_scalar`. A node takes 700 bytes, so the
    text is read no further than the bounds."""

    yaml_implicit_resolvers = {"<": Resolver.yaml_implicit_resolvers["<"]}

    def __init__(self, text: str, *, max_entries: int) -> None:
        super().__init__(text)
        self._max_entries = max_entries  # of one list or mapping
        self._nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._nodes += 1
        why = ""
        if self._nodes > _MAX_NODES:
            why = f"more than {_MAX_NODES} values"
        elif parent is not None and len(parent.value) >= self._max_entries:
            why = f"more than {self._max_entries} entries"
        if why:
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, why, event.start_mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        return node


def plain_scalar(text: str) -> Any:
    """Return what an unquoted YAML scalar means: null, a boolean, a number, or the text itself."""
    if _NULL.fullmatch(text):
        return None
    if _BOOL.fullmatch(text):
        return text.lower() == "true"
    if _INT.fullmatch(text):
        return int(text, 0) if text[:2] in ("0x", "0o") else int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


def parse_yaml(text: str, *, max_entries: int = _MAX_NODES) -> tuple[Any, list[Problem]]:
    """Plain dicts, lists and scalars, and the problems: syntax with line and column, and every duplicate key.

    After a syntax error, or more entries than that in one list or mapping, the data is None; after the others it is
    usable. Messages never quote values.
    """
    data, problems, _ = parse_yaml_with_places(text, max_entries=max_entries)
    return data, problems


def parse_yaml_with_places(text: str, *, max_entries: int = _MAX_NODES) -> tuple[Any, list[Problem], Place]:
    """Return the same, and where each value stands."""
    try:
        loader = _Composer(text, max_entries=max_entries)
        try:
            node = loader.get_single_node()
        finally:
            loader.dispose()
        builder = _Builder()
        root = Place() if node is None else _place(node)
        data = None if node is None else builder.build(node, 0, root)
    except yaml.reader.ReaderError as error:
        line, column = _line_of(text, error.position)
        what = f"character #x{ord(text[error.position]):02x} is not allowed"
        return None, [Problem("", what, line=line, column=column)], Place()
    except yaml.MarkedYAMLError as error:
        what = ": ".join(part for part in (error.context, error.problem) if part)
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (0, 0)
        hint = "indent with spaces, not with tabs" if "'\\t'" in what else _quoting_hint(text, mark)
        return None, [Problem("", f"YAML syntax: {what}", hint, line=line, column=column)], Place()
    except RecursionError:
        return None, [Problem("", f"nested more than {_MAX_DEPTH} levels deep")], Place()
    return data, builder.problems, root


class _Builder:
    """Nodes to data, with a list of what was wrong on the way, and the place of everything."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self._nodes = 0

    def build(self, node: yaml.Node, depth: int, place: Place) -> Any:
        """Return the data of one node; raises ComposerError beyond the bounds."""
        self._nodes += 1
        if self._nodes > _MAX_NODES or depth > _MAX_DEPTH:
            bound = f"{_MAX_NODES} values" if self._nodes > _MAX_NODES else f"{_MAX_DEPTH} levels"
            raise yaml.composer.ComposerError(None, None, f"more than {bound} (aliases included)", node.start_mark)
        if isinstance(node, yaml.SequenceNode):
            return [self._item(item, depth, place, index) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, depth, place)
        if not node.tag.startswith(_TAG):
            self._problem(node, "tags like !name are not supported")
        plain = isinstance(node, yaml.ScalarNode) and node.style is None and node.tag == f"{_TAG}str"
        return plain_scalar(node.value) if plain else node.value

    def _item(self, node: yaml.Node, depth: int, place: Place, index: int) -> Any:
        below = place.below[f"[{index}]"] = _place(node)
        return self.build(node, depth + 1, below)

    def _mapping(self, node: yaml.MappingNode, depth: int, place: Place) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        own: dict[str, Any] = {}
        places: dict[str, Place] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._problem(key_node, "a key must be plain text")
                continue
            here = _place(key_node)
            value = self.build(value_node, depth + 1, here)
            if key_node.tag == f"{_TAG}merge":
                self._merge(merged, value, key_node)
                self._merge_places(place.below, here, value)
                continue
            if key_node.value in own:
                self._problem(key_node, f"duplicate key {key_node.value!r}")
            own[key_node.value] = value
            places[key_node.value] = here
        place.below.update(places)
        return {**merged, **own}

    def _merge(self, into: dict[str, Any], value: Any, node: yaml.Node) -> None:
        for source in value if isinstance(value, list) else [value]:
            if isinstance(source, dict):
                into.update({key: item for key, item in source.items() if key not in into})
            else:
                self._problem(node, "<< merges mappings only")

    @staticmethod
    def _merge_places(into: dict[str, Place], place: Place, value: Any) -> None:
        """Merge places; a merged value keeps the place it was written at first."""
        for source in place.below.values() if isinstance(value, list) else [place]:
            for key, below in source.below.items():
                into.setdefault(key, below)

    def _problem(self, node: yaml.Node, message: str) -> None:
        place = _place(node)
        problem = Problem("", message, line=place.line, column=place.column)
        if problem not in self.problems:
            self.problems.append(problem)


def _place(node: yaml.Node) -> Place:
    return Place(node.start_mark.line + 1, node.start_mark.column + 1)


def _quoting_hint(text: str, mark: yaml.Mark | None) -> str:
    lines = text.splitlines()
    line = lines[mark.line] if mark is not None and mark.line < len(lines) else ""
    return 'inside { } or [ ] write "${NAME}" in quotes' if "${" in line else ""


def _line_of(text: str, position: int) -> tuple[int, int]:
    before = text[:position]
    return before.count("\n") + 1, position - before.rfind("\n")


_PLACEHOLDER = re.compile(r"\$(?:(\$)|\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}|(\{))")


class Substituted(str):
    """Text that came from the environment: error messages, which quote with `repr`, must not show it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "(a value from the environment)"


def substitute_variables(tree: Any, env: Mapping[str, str], where: Where) -> tuple[Any, list[Problem]]:
    """Return the tree with its placeholders replaced, and a problem for each variable that is missing or malformed.

    An empty variable counts as unset where a default is given, as in a shell. A missing one leaves empty text.
    """
    problems: list[Problem] = []

    def replaced(value: Any, path: Path) -> Any:
        if isinstance(value, dict):
            return {key: replaced(item, (*path, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [replaced(item, (*path, index)) for index, item in enumerate(value)]
        if not isinstance(value, str) or "$" not in value:
            return value
        text, messages = _expand(value, env)
        problems.extend(Problem(where(path), message) for message in messages)
        return text

    return replaced(tree, ()), problems


def _expand(text: str, env: Mapping[str, str]) -> tuple[str, list[str]]:
    messages: list[str] = []
    from_environment = False

    def value_of(match: re.Match[str]) -> str:
        nonlocal from_environment
        escaped, name, default, malformed = match.groups()
        if escaped:
            return "$"
        if malformed:
            messages.append("a placeholder is written ${NAME} or ${NAME:-default}; write $$ for a dollar sign")
            return ""
        from_environment = True
        value = env.get(name)
        if default is not None:
            return value or default
        if value is None:
            messages.append(f"environment variable {name} is not set")
        return value or ""

    expanded = _PLACEHOLDER.sub(value_of, text)
    return (Substituted(expanded) if from_environment else expanded), messages


def retype_scalars(tree: Any) -> Any:
    """Return the tree with substituted values read as YAML scalars, for settings that no schema types."""
    if isinstance(tree, dict):
        return {key: retype_scalars(item) for key, item in tree.items()}
    if isinstance(tree, list):
        return [retype_scalars(item) for item in tree]
    return plain_scalar(tree) if isinstance(tree, Substituted) else tree
