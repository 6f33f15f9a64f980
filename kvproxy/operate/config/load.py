"""Configurations into `Config`, in any dialect, from a file, text, or plain data."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path as FilePath
from types import MappingProxyType
from typing import Any

from kvproxy.base.errors import ConfigError, Problem
from kvproxy.base.settings.compose import composed
from kvproxy.base.settings.feature_settings import settings_of_features
from kvproxy.base.settings.model import Model
from kvproxy.base.settings.paths import Finding, Path, dotted_path
from kvproxy.cluster.settings import ClusterSettings
from kvproxy.operate.config.decode import (
    UNKNOWN_KEY,
    Origins,
    closest_word,
    decode_model,
    is_inside,
    keys_of,
    sort_in_file_order,
    spelling_hint,
)
from kvproxy.operate.config.schema import Config
from kvproxy.operate.config.shorthand import Canonical, to_canonical_form
from kvproxy.operate.config.verify import find_faults
from kvproxy.operate.config.yaml_text import parse_yaml_with_places, retype_scalars, substitute_variables
from kvproxy.proxy.filter_settings import filter_models, order_filters
from kvproxy.proxy.settings import FilterSpec


def decode_native(
    raw: Mapping[str, Any], *, extra_filters: Mapping[str, type[Model] | None], known: Sequence[Problem] = ()
) -> tuple[Config | None, list[Problem]]:
    """Return the configuration, best effort if there are errors, and every problem in the order of the checks.

    `known`: problems found before, returned with the rest; their consequences are not reported again."""
    form = to_canonical_form(dict(raw))
    form.begin_with(known)
    return decode_form(form, extra_filters=extra_filters)


def decode_form(
    form: Canonical, *, extra_filters: Mapping[str, type[Model] | None]
) -> tuple[Config | None, list[Problem]]:
    """Return the same for a form that another dialect produced."""
    decoded = decode_model(composed(Config), form.data, form.origins)
    for problem in decoded.problems:
        form.add_problem(_with_shorthands(problem, form))
    filters = _filters(form, {**filter_models(), **extra_filters})
    if decoded.value is None:
        return None, form.problems
    config = decoded.value.model_copy(update={"filters": filters})
    errors = [problem for problem in form.problems if problem.severity == "error"]
    broken = [path for problem in errors for path in (problem.path, problem.meant) if path]

    def written(path: Path) -> str:
        return form.origins(decoded.moved.find_written(path))

    for finding in find_faults(config):
        at = written(finding.path)
        if not _stumbled(finding, at, [written(path) for path in finding.follows], broken):
            form.add_problem(Problem(at, finding.message, finding.hint, finding.severity))
    return config, form.problems


def _stumbled(finding: Finding, at: str, follows: list[str], broken: list[str]) -> bool:
    """Return True if a cross-check only met the defaults in place of a part that is wrong itself."""
    about = [at, *follows] if finding.absence else follows
    return any(
        is_inside(at, path) or any(is_inside(one, path) or is_inside(path, one) for one in about) for path in broken
    )


def _with_shorthands(problem: Problem, form: Canonical) -> Problem:
    """At the top level the short forms are keys too."""
    if problem.message != UNKNOWN_KEY or problem.path not in form.data:
        return problem
    known = [*keys_of(composed(Config)), *keys_of(composed(ClusterSettings))]
    return replace(problem, hint=spelling_hint(problem.path, known), meant=closest_word(problem.path, known) or "")


def _filters(form: Canonical, known: Mapping[str, type[Model] | None]) -> tuple[FilterSpec, ...]:
    specs: list[FilterSpec] = []
    named = form.filters or [(name, None, ("filters",)) for name in order_filters()]
    for name, settings, written in named:
        if name in known:
            specs.append(FilterSpec(name=name, settings=_settings(form, known[name], settings, written)))
        else:
            form.add_error(written, f"unknown filter {name!r}", spelling_hint(name, known))
            meant = closest_word(name, known) or name  # checks the order of routes by the intended name
            specs.append(FilterSpec.model_construct(name=meant))
        form.origins.add_move(("filters", len(specs) - 1), written)
    return tuple(specs)


def _settings(form: Canonical, kind: type[Model] | None, raw: Any, written: Path) -> Any:
    raw = {} if raw is None else raw
    if kind is None:
        return retype_scalars(raw)
    decoded = decode_model(kind, raw, Origins([((), written)]))
    for problem in decoded.problems:
        form.add_problem(problem, tolerable=problem.message == UNKNOWN_KEY)
    return decoded.value


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
    return usable(check_config(source, env=env, extra_filters=extra_filters, lenient=lenient))


def check_config(
    source: Source,
    *,
    env: Mapping[str, str] = os.environ,
    extra_filters: ExtraFilters = NO_EXTRA_FILTERS,
    lenient: bool = False,
) -> Checked:
    """Return the configuration, None if any problem is an error, and all problems: errors, warnings, notes.

    Problems of all stages come in one run, in the order of the text, with line and column where there is one. With
    `lenient`, unknown settings of a file in another dialect are warnings."""
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
    if "endpoints" not in raw and all(isinstance(value, str) and "://" in value for value in raw.values()):
        return None, [Problem("", "these are endpoints and no settings", "name them `endpoints`")]
    tree, missing = substitute_variables(raw, env, dotted_path)
    dialects = (one.dialect for one in settings_of_features() if one.dialect is not None)
    dialect = next((one for one in dialects if one.recognizes(tree)), None)
    if dialect is not None:
        config, problems = dialect.decode(tree, extra_filters=extra_filters, lenient=lenient, known=missing)
    else:
        config, problems = decode_native(tree, extra_filters=extra_filters, known=missing)
    return (None if any(problem.severity == "error" for problem in problems) else config), problems


def usable(checked: Checked) -> Config:
    """Return the configuration. Raises ConfigError with every error."""
    config, problems = checked
    errors = [problem for problem in problems if problem.severity == "error"]
    if config is None or errors:
        raise ConfigError(errors)
    return config
