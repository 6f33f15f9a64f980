"""Configurations into `Config`: native or Pixiu, from a file, text, or plain data."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path as FilePath
from types import MappingProxyType
from typing import Any

from kvproxy.base.errors import ConfigError, Problem
from kvproxy.base.installed import installed
from kvproxy.base.settings.model import Model
from kvproxy.base.settings.paths import dotted_path, sort_in_file_order
from kvproxy.base.settings.yaml_text import parse_yaml_with_places, substitute_variables
from kvproxy.operate.config.native import decode_native
from kvproxy.operate.config.schema import Config
from kvproxy.operate.feature import Feature

#: A file, YAML (or JSON) text, or plain data as in a YAML file. A path is a `Path`: any `str` is text.
Source = FilePath | str | Mapping[str, Any] | Sequence[Any] | None
#: Settings types of third-party filters; None: the filter gets its settings as plain data.
ExtraFilters = Mapping[str, type[Model] | None]
Checked = tuple[Config | None, list[Problem]]

NO_EXTRA_FILTERS: ExtraFilters = MappingProxyType({})
_MAX_FILE_BYTES = 4 * 1024 * 1024


def load_config(
    source: Source,
    *,
    env: Mapping[str, str] = os.environ,
    extra_filters: ExtraFilters = NO_EXTRA_FILTERS,
    lenient: bool = False,
) -> Config:
    """Return the configuration that `source` holds. Raises ConfigError with every error."""
    return _usable(check_config(source, env=env, extra_filters=extra_filters, lenient=lenient))


def check_config(
    source: Source,
    *,
    env: Mapping[str, str] = os.environ,
    extra_filters: ExtraFilters = NO_EXTRA_FILTERS,
    lenient: bool = False,
) -> Checked:
    """Return the configuration, None if any problem is an error, and all problems: errors, warnings, notes.

    Problems of all stages come in one run, in the order of the text, with line and column where there is one. With
    `lenient`, unknown settings of a Pixiu file are warnings."""
    if isinstance(source, FilePath):
        text, problems = _read(source)
        if text is None:
            return None, problems
        config, problems = check_config(text, env=env, extra_filters=extra_filters, lenient=lenient)
        return config, [replace(problem, file=str(source)) for problem in problems]
    if isinstance(source, str):
        raw, faults, places = parse_yaml_with_places(source)
        if raw is None and faults:
            return None, faults
        config, problems = _check_data(raw, env=env, extra_filters=extra_filters, lenient=lenient)
        return (None if faults else config), sort_in_file_order([*faults, *problems], places)
    return _check_data(source, env=env, extra_filters=extra_filters, lenient=lenient)


def _read(path: FilePath) -> tuple[str | None, list[Problem]]:
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_FILE_BYTES + 1)
        text = raw.decode("utf-8-sig")
    except OSError as error:
        return None, [Problem("", f"cannot read {path}: {error.strerror}")]
    except UnicodeDecodeError as error:
        return None, [Problem("", f"not UTF-8 text (byte {error.start})", file=str(path))]
    if len(raw) > _MAX_FILE_BYTES:
        return None, [Problem("", f"larger than {_MAX_FILE_BYTES} bytes", file=str(path))]
    return text, []


def _check_data(raw: object, *, env: Mapping[str, str], extra_filters: ExtraFilters, lenient: bool) -> Checked:
    if not isinstance(raw, dict) or not raw:
        return None, [Problem("", "a configuration is a mapping; the shortest is `endpoints: [http://host:port]`")]
    if "model_list" in raw and "endpoints" not in raw and "clusters" not in raw:
        what = "this is a configuration of LiteLLM's proxy"
        hint = "docs/migrating.md#litellm-proxy shows its translation: clusters, and routes by model"
        return None, [Problem("model_list", what, hint)]
    tree, missing = substitute_variables(raw, env, dotted_path)
    dialect = next((feature for feature in installed(Feature) if feature.recognizes(tree)), None)
    if dialect is not None:
        config, problems = dialect.decode(tree, extra_filters=extra_filters, lenient=lenient, known=missing)
    else:
        config, problems = decode_native(tree, extra_filters=extra_filters, known=missing)
    return (None if any(problem.severity == "error" for problem in problems) else config), problems


def _usable(checked: Checked) -> Config:
    config, problems = checked
    errors = [problem for problem in problems if problem.severity == "error"]
    if config is None or errors:
        raise ConfigError(errors)
    return config
