"""The JSON Schema and the reference page say what the loader does."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from kvproxy.base.settings.compose import composed
from kvproxy.base.settings.model import Model, read_descriptions
from kvproxy.operate.config.decode import bare_type
from kvproxy.operate.config.load import check_config
from kvproxy.operate.config.reference import file_schema, render_reference
from kvproxy.operate.config.schema import Config
from kvproxy.proxy.filter_settings import filter_models

ROOT = Path(__file__).parents[3]
E = ["http://127.0.0.1:8000"]


@cache
def validator() -> Draft202012Validator:
    return Draft202012Validator(file_schema())


def test_the_schema_is_a_schema() -> None:
    """Valid under its own draft, without dangling references."""
    schema = file_schema()
    Draft202012Validator.check_schema(schema)
    assert {f"filter_{name}" for name in filter_models()} <= set(schema["$defs"])
    validator().validate({"endpoints": E})


@pytest.mark.parametrize(
    "raw",
    [
        {"endpoints": E, "listen": ":8888", "admin": False},
        {"endpoints": {"a": E[0], "b": {"url": "http://h:1", "weight": "${W:-2}"}}, "listen": 9, "admin": 1},
        {"endpoints": [f"a={E[0]}"], "policy": "${P:-random}", "timeouts": {"connect": "1m30s", "idle": 5}},
        {"clusters": {"x": {"endpoints": E}}, "routes": [{"cluster": "x"}], "limits": {"body": "8MiB"}},
        {"endpoints": [{"id": "a", "url": E[0], "api_key": "k", "retry": {"attempts": 2}}]},
        {"endpoints": E, "filters": {"auth": {"keys": [{"name": "a", "key": "k"}]}, "kvcache": None}},
        {"endpoints": E, "filters": ["inference_request", {"cors": {"allow_origins": ["*"]}}, "kvcache", "router"]},
        {"endpoints": E, "filters": [{"inference_request": None}, "kvcache", {"router": {"debug_header": ""}}]},
    ],
)  # fmt: skip
def test_the_schema_accepts_what_the_loader_accepts(raw: dict[str, Any]) -> None:
    """Short forms and placeholders included."""
    config, problems = check_config(raw, env={})
    assert config is not None, problems
    validator().validate(raw)


@pytest.mark.parametrize(
    "raw",
    [
        {"endpoints": E, "polcy": "random"},
        {"endpoints": E, "policy": "fastest"},
        {"endpoints": [{"id": "a"}]},
        {"endpoints": E, "listen": {"port": 99999}},
        {"endpoints": E, "timeouts": {"connect": "5 furlongs"}},
        {"endpoints": E, "filters": [{"cors": {"allow_orgins": []}}, "kvcache", "router"]},
        {"endpoints": E, "filters": {"cors": {"allow_orgins": []}}},
        {"endpoints": E, "filters": "auth"},
        {"endpoints": E, "filters": [{"cors": {}, "auth": {}}, "router"]},
        {},
    ],
)
def test_the_schema_rejects_what_the_loader_rejects(raw: dict[str, Any]) -> None:
    """An editor marks the same mistakes."""
    config, _ = check_config(raw, env={})
    assert config is None
    assert not validator().is_valid(raw)


def test_the_file_at_the_top_is_valid() -> None:
    """An editor shows it without a mark."""
    validator().validate(yaml.safe_load((ROOT / "config.yaml").read_text()))


def test_the_reference_page_is_current() -> None:
    """docs/configuration.md is what the schema generates: python -m kvproxy.operate.config.reference."""
    assert (ROOT / "docs" / "configuration.md").read_text() == render_reference()


def _models(model: type[Model]) -> list[type[Model]]:
    found = [model]
    for field in model.model_fields.values():
        for kind in (bare_type(field.annotation), *getattr(field.annotation, "__args__", ())):
            inner = bare_type(kind)
            if isinstance(inner, type) and issubclass(inner, Model) and inner not in found:
                found += [other for other in _models(inner) if other not in found]
    return found


@pytest.mark.parametrize("model", _models(composed(Config)) + list(filter_models().values()))
def test_every_setting_is_documented(model: type[Model]) -> None:
    """A sentence for each model and each of its fields."""
    assert model.__doc__
    undocumented = [name for name in model.model_fields if not read_descriptions(model).get(name, "").strip()]
    assert undocumented == []
