"""Configuration files into `Config`: native or Pixiu, from a file, text, a mapping or `--endpoint` options.

`check_*` return every problem of a file in one run, whatever stage it belongs to; `load_*` raise on errors.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path as FilePath
from types import MappingProxyType

from kvproxy.config.environment import substitute
from kvproxy.config.model import Model
from kvproxy.config.native import decode_native
from kvproxy.config.paths import dotted
from kvproxy.config.pixiu import decode_pixiu, is_pixiu
from kvproxy.config.places import in_file_order
from kvproxy.config.schema import Config
from kvproxy.config.shorthand import mapping_of
from kvproxy.config.yaml_text import parse_yaml_with_places
from kvproxy.errors import ConfigError, Problem

#: Settings types of filters that are not shipped here; None: the filter gets its settings as plain data.
ExtraFilters = Mapping[str, type[Model] | None]
Checked = tuple[Config | None, list[Problem]]

NO_EXTRA_FILTERS: ExtraFilters = MappingProxyType({})
_MAX_FILE_BYTES = 4 * 1024 * 1024


def load_file(
    path: str | os.PathLike[str],
    *,
    env: Mapping[str, str] = os.environ,
    extra_filters: ExtraFilters = NO_EXTRA_FILTERS,
    lenient: bool = False,
) -> Config:
    """The configuration in a file. Raises ConfigError with every problem."""
    return _usable(check_file(path, env=env, extra_filters=extra_filters, lenient=lenient))


def load_text(
    text: str,
    *,
    env: Mapping[str, str] = os.environ,
    extra_filters: ExtraFilters = NO_EXTRA_FILTERS,
    lenient: bool = False,
) -> Config:
    """The configuration in YAML (or JSON) text. Raises ConfigError with every problem."""
    return _usable(check_text(text, env=env, extra_filters=extra_filters, lenient=lenient))


def load_mapping(
    raw: object,
    *,
    env: Mapping[str, str] = os.environ,
    extra_filters: ExtraFilters = NO_EXTRA_FILTERS,
    lenient: bool = False,
) -> Config:
    """The configuration in plain data as a YAML file would hold it. Raises ConfigError with every problem."""
    return _usable(check_mapping(raw, env=env, extra_filters=extra_filters, lenient=lenient))


def from_endpoints(endpoints: Sequence[str], *, host: str, port: int, policy: str | None = None) -> Config:
    """The configuration that `--endpoint [id=]url` options stand for, taken literally (no `${VAR}`)."""
    raw = mapping_of(endpoints, host=host, port=port, policy=policy)
    return _usable(decode_native(raw, extra_filters=NO_EXTRA_FILTERS))


def check_file(
    path: str | os.PathLike[str],
    *,
    env: Mapping[str, str] = os.environ,
    extra_filters: ExtraFilters = NO_EXTRA_FILTERS,
    lenient: bool = False,
) -> Checked:
    """The configuration in a file, None if any problem is an error, and all problems: errors, warnings, notes.

    With `lenient`, what a Pixiu file says and we do not know is a warning.
    """
    name = os.fspath(path)
    try:
        with FilePath(path).open("rb") as file:
            raw = file.read(_MAX_FILE_BYTES + 1)
        text = raw.decode("utf-8-sig")
    except OSError as error:
        return None, [Problem("", f"cannot read {name}: {error.strerror}")]
    except UnicodeDecodeError as error:
        return None, [Problem("", f"not UTF-8 text (byte {error.start})", file=name)]
    if len(raw) > _MAX_FILE_BYTES:
        return None, [Problem("", f"larger than {_MAX_FILE_BYTES} bytes", file=name)]
    config, problems = check_text(text, env=env, extra_filters=extra_filters, lenient=lenient)
    return config, [replace(problem, file=name) for problem in problems]


def check_text(
    text: str,
    *,
    env: Mapping[str, str] = os.environ,
    extra_filters: ExtraFilters = NO_EXTRA_FILTERS,
    lenient: bool = False,
) -> Checked:
    """Like `check_file`, for YAML text: the problems in its order, with line and column."""
    raw, problems, places = parse_yaml_with_places(text)
    if raw is None and problems:
        return None, problems
    config, more = check_mapping(raw, env=env, extra_filters=extra_filters, lenient=lenient)
    return (None if problems else config), in_file_order([*problems, *more], places)


def check_mapping(
    raw: object,
    *,
    env: Mapping[str, str] = os.environ,
    extra_filters: ExtraFilters = NO_EXTRA_FILTERS,
    lenient: bool = False,
) -> Checked:
    """Like `check_file`, for plain data."""
    if not isinstance(raw, dict) or not raw:
        return None, [Problem("", "a configuration is a mapping; the shortest is `endpoints: [http://host:port]`")]
    tree, missing = substitute(raw, env, dotted)
    if is_pixiu(tree):
        config, problems = decode_pixiu(tree, extra_filters=extra_filters, lenient=lenient, known=missing)
    else:
        config, problems = decode_native(tree, extra_filters=extra_filters, known=missing)
    return (None if any(problem.severity == "error" for problem in problems) else config), problems


def _usable(checked: Checked) -> Config:
    config, problems = checked
    errors = [problem for problem in problems if problem.severity == "error"]
    if config is None or errors:
        raise ConfigError(errors)
    return config
