"""JSON Schema of the native file format, short forms included, for editors (`kvproxy check --schema`)."""

from __future__ import annotations

from typing import Any

from kvproxy.config.cluster_schema import ClusterSettings
from kvproxy.config.fields import keys_of
from kvproxy.config.filter_schema import FILTER_SETTINGS
from kvproxy.config.schema import Config

_ADDRESS = {"type": "string", "pattern": r"^(.*:)?\d{1,5}$|\$\{", "description": "host:port, :port or [ipv6]:port"}
_PORT = {"type": "integer", "minimum": 0, "maximum": 65535}
_PLACEHOLDER = {"type": "string", "pattern": r"\$\{"}
_TYPED = {"integer", "number", "boolean"}


def file_schema() -> dict[str, Any]:
    """Draft 2020-12 schema of a configuration file as a person writes it."""
    schema = Config.model_json_schema()
    definitions = schema["$defs"]
    for name, kind in FILTER_SETTINGS.items():
        settings = kind.model_json_schema(ref_template="#/$defs/{model}")
        definitions.update(settings.pop("$defs", {}))
        definitions[f"filter_{name}"] = settings
    for name, definition in definitions.items():
        definitions[name] = _with_placeholders(definition)
    _endpoints(definitions)
    properties = _with_placeholders(schema["properties"])
    for key in keys_of(ClusterSettings):
        short = {**definitions["ClusterSettings"]["properties"][key]}
        short["description"] = f"Short for `clusters.default.{key}`. {short.get('description', '')}".rstrip()
        properties[key] = short
    properties["listen"] = _either(properties["listen"], _ADDRESS, _PORT)
    properties["admin"] = _either(properties["admin"], _ADDRESS, _PORT, {"const": False})
    properties["filters"] = _filters(properties["filters"])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "kvproxy configuration",
        "type": "object",
        "additionalProperties": False,
        "minProperties": 1,
        "properties": properties,
        "$defs": {name: definition for name, definition in definitions.items() if name != "FilterSpec"},
    }


def _either(first: dict[str, Any], *others: dict[str, Any]) -> dict[str, Any]:
    """`first` or one of the others, with its description and default kept outside."""
    outer: dict[str, Any] = {key: first[key] for key in ("description", "default") if key in first}
    inner = {key: value for key, value in first.items() if key not in outer}
    return {**outer, "anyOf": [inner, *others]}


def _endpoints(definitions: dict[str, Any]) -> None:
    """A list of endpoints or `id=url` texts, or a mapping of ids to endpoints or urls."""
    endpoint = definitions["EndpointSettings"]
    endpoint["required"] = ["url"]
    one = {"anyOf": [{"$ref": "#/$defs/EndpointSettings"}, {"type": "string", "minLength": 1}]}
    listed = definitions["ClusterSettings"]["properties"]["endpoints"]
    outer: dict[str, Any] = {key: listed[key] for key in ("description", "default") if key in listed}
    forms = [{"type": "array", "items": one}, {"type": "object", "additionalProperties": one}]
    definitions["ClusterSettings"]["properties"]["endpoints"] = {**outer, "anyOf": forms}


def _filters(listed: dict[str, Any]) -> dict[str, Any]:
    """Names, or one-key mappings; names of other people's filters are allowed with any settings."""
    settings = {name: {"anyOf": [{"$ref": f"#/$defs/filter_{name}"}, {"type": "null"}]} for name in FILTER_SETTINGS}
    mapping = {"type": "object", "minProperties": 1, "maxProperties": 1, "properties": settings}
    name = {"anyOf": [{"enum": sorted(FILTER_SETTINGS)}, {"type": "string", "minLength": 1}]}
    return {"description": listed["description"], "type": "array", "items": {"anyOf": [name, mapping]}}


def _with_placeholders(schema: Any) -> Any:
    """Wherever a number or a boolean may stand, `${VARIABLE}` may too; enumerations likewise."""
    if isinstance(schema, list):
        return [_with_placeholders(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    walked = {key: _with_placeholders(value) for key, value in schema.items()}
    if walked.get("type") in _TYPED or "enum" in walked:
        return _either(walked, _PLACEHOLDER)
    return walked
