"""A Pixiu file on its way into our form: what was translated so far, and what was said about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from kvproxy.config.decode import UNKNOWN_KEY, decode_model
from kvproxy.config.model import Model
from kvproxy.config.paths import Origins, Path, dotted_path
from kvproxy.config.shorthand import Canonical
from kvproxy.errors import Problem

K = TypeVar("K", bound=Model)


class Translation:
    """The form being built. With `lenient`, what we do not have is a warning instead of an error."""

    def __init__(self, *, lenient: bool) -> None:
        self.form = Canonical({}, lenient=lenient)

    def decode(self, kind: type[K], raw: Mapping[str, Any] | None, at: Path) -> K | None:
        """`raw` (nothing: defaults) as `kind`; its problems are kept."""
        decoded = decode_model(kind, raw or {}, Origins([((), at)]))
        for problem in decoded.problems:
            self.form.add_problem(problem, tolerable=problem.message == UNKNOWN_KEY)
        return decoded.value

    def set_value(self, section: str, key: str, value: Any, at: Path) -> None:
        """Set one of our settings, written at `at`."""
        self.form.data.setdefault(section, {})[key] = value
        self.form.origins.add_move((section, key), at)

    def add_note(self, at: Path, message: str) -> None:
        """We knowingly do this otherwise."""
        self.form.add_problem(Problem(dotted_path(at), message, severity="note"))

    def add_warning(self, at: Path, message: str, hint: str = "") -> None:
        """Loads, but is probably not what was meant."""
        self.form.add_problem(Problem(dotted_path(at), message, hint, "warning"))

    def add_error(self, at: Path, message: str, hint: str = "") -> None:
        """Cannot be used; said once where the value was already found to be wrong."""
        if all(problem.path != dotted_path(at) for problem in self.form.problems):
            self.form.add_error(at, message, hint)

    def add_unsupported(self, at: Path, message: str, hint: str = "") -> None:
        """Pixiu has it, we do not."""
        self.form.add_problem(Problem(dotted_path(at), message, hint), tolerable=True)
