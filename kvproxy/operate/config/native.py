"""A native file's mapping into a checked `Config`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvproxy.base.errors import Problem
from kvproxy.base.settings.compose import composed
from kvproxy.base.settings.decode import UNKNOWN_KEY, decode_model
from kvproxy.base.settings.model import Model
from kvproxy.base.settings.paths import Finding, Origins, Path, closest_word, is_inside, keys_of, spelling_hint
from kvproxy.base.settings.yaml_text import retype_scalars
from kvproxy.cluster.settings import ClusterSettings
from kvproxy.operate.config.schema import Config
from kvproxy.operate.config.shorthand import Canonical, to_canonical_form
from kvproxy.operate.config.verify import find_faults
from kvproxy.proxy.filter_settings import DEFAULT_FILTERS, filter_models
from kvproxy.proxy.settings import FilterSpec


def decode_native(
    raw: Mapping[str, Any], *, extra_filters: Mapping[str, type[Model] | None], known: Sequence[Problem] = ()
) -> tuple[Config | None, list[Problem]]:
    """Return the configuration, best effort if there are errors, and every problem in the order of the checks.

    `known`: problems found before, returned with the rest; their consequences are not reported again."""
    form = to_canonical_form(dict(raw))
    form.begin_with(known)
    _leave_profile_out(form)
    return decode_form(form, extra_filters=extra_filters)


def _leave_profile_out(form: Canonical) -> None:
    """Report a setting of earlier versions that has no effect any more."""
    if "profile" in form.data:
        form.data = {name: value for name, value in form.data.items() if name != "profile"}
        hint = "leave it out; for batch traffic write `timeouts: {first_byte: 1h}`"
        form.add_problem(Problem("profile", "ignored: profiles no longer exist", hint, severity="warning"))


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
    named = form.filters or [(name, None, ("filters",)) for name in DEFAULT_FILTERS]
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
