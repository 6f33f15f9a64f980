"""benchmarks/reports/routing-constants.md says what the code has."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from types import ModuleType
from typing import Any

import pytest

from kvproxy.cluster.routing.waiting_lines import AGEING
from tests.docs.blocks import ROOT

MODULES = (
    "kv_aware",
    "heat",
    "traffic",
    "load",
    "samples",
    "work",
    "speeds",
    "onboarding",
    "engine_samples",
    "fair_queue",
)
CONSTRUCTED = (
    "kv_aware.CostWeights",
    "traffic.Utilisation",
    "traffic.ArrivalStats",
    "speeds.SpeedPriors",
    "speeds.SpeedModel",
    "fair_queue.QueueSettings",
)
_ROW = re.compile(r"^\| `([\w.]+)` \| ([^|]+) \|")


def rows() -> dict[str, str]:
    """Value by name, as the page has them."""
    lines = (ROOT / "benchmarks" / "reports" / "routing-constants.md").read_text().splitlines()
    return {found[1]: found[2].strip() for line in lines if (found := _ROW.match(line))}


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"kvproxy.{'cache.indexes' if name == 'heat' else 'cluster.routing'}.{name}")


def _numbers_of(name: str) -> Iterator[tuple[str, Any]]:
    """Numbers that a module names in capitals."""
    module = _module(name)
    for node in ast.parse(inspect.getsource(module)).body:
        targets = node.targets if isinstance(node, ast.Assign) else ()
        for target in targets:
            for each in target.elts if isinstance(target, ast.Tuple) else (target,):
                if isinstance(each, ast.Name) and isinstance(value := getattr(module, each.id), int | float):
                    yield f"{name}.{each.id}", value


def _defaults_of(name: str) -> Iterator[tuple[str, Any]]:
    """Numbers a class is made with unless told otherwise."""
    module, kind = name.split(".")
    made = getattr(_module(module), kind)
    if is_dataclass(made):
        defaults = {field.name: field.default for field in fields(made)}
    else:
        defaults = {each.name: each.default for each in inspect.signature(made).parameters.values()}
    for parameter, value in defaults.items():
        if isinstance(value, int | float):
            yield f"{kind}.{parameter}", value


def constants() -> dict[str, Any]:
    """Every number the decision goes by."""
    found = dict(pair for name in MODULES for pair in _numbers_of(name))
    found["waiting_lines.AGEING"] = AGEING  # the other numbers there are of engine priority
    return found | dict(pair for name in CONSTRUCTED for pair in _defaults_of(name))


def test_every_constant_has_a_row() -> None:
    """None is left out, and none is listed that is no more."""
    assert set(rows()) == set(constants())


@pytest.mark.parametrize("name", sorted(constants()))
def test_values_are_those_of_the_code(name: str) -> None:
    """A number that changed there changes here, with what it is worth now."""
    value = constants()[name]
    assert rows()[name] == f"{value:,.10g}"
