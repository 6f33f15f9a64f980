"""`${VAR}`, `${VAR:-default}` and `$$` in the text values of a configuration, after it was parsed.

A value can therefore never add keys or change the file's structure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kvproxy.config.paths import Path, Where
from kvproxy.config.yaml_text import plain_scalar
from kvproxy.errors import Problem

_PLACEHOLDER = re.compile(r"\$(?:(\$)|\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}|(\{))")


class Substituted(str):
    """Text that came from the environment: error messages, which quote with `repr`, must not show it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "(a value from the environment)"


def substitute_variables(tree: Any, env: Mapping[str, str], where: Where) -> tuple[Any, list[Problem]]:
    """The tree with its placeholders replaced, and a problem for each variable that is missing or malformed.

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
    """The tree with substituted values read as YAML scalars, for settings that no schema types."""
    if isinstance(tree, dict):
        return {key: retype_scalars(item) for key, item in tree.items()}
    if isinstance(tree, list):
        return [retype_scalars(item) for item in tree]
    return plain_scalar(tree) if isinstance(tree, Substituted) else tree
