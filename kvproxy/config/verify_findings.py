"""What a cross-check reports before its path is put into words."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import NamedTuple

from kvproxy.config.paths import Path
from kvproxy.errors import Severity


class Finding(NamedTuple):
    """A problem at a path of the model."""

    path: Path
    message: str
    hint: str
    severity: Severity
    absence: bool = False
    """It says that something below the path is missing, which is untrue if that was only wrong."""
    follows: tuple[Path, ...] = ()
    """Other places that it draws on: nothing is said when one of them is wrong itself."""


def error(
    path: Path, message: str, hint: str = "", *, absence: bool = False, follows: tuple[Path, ...] = ()
) -> Finding:
    """Refuses the configuration."""
    return Finding(path, message, hint, "error", absence, follows)


def warning(path: Path, message: str, hint: str = "", *, follows: tuple[Path, ...] = ()) -> Finding:
    """Usable, but probably not what was meant."""
    return Finding(path, message, hint, "warning", False, follows)


def missing_file(path: Path, name: str) -> Iterator[Finding]:
    """An error when `name` is no file."""
    if not FilePath(name).is_file():
        yield error(path, f"no such file: {name!r}")
