"""The models as documents: docs/configuration.md, and the JSON Schema for editors (`kvproxy check --schema`).

`python -m kvproxy.operate.config.reference > docs/configuration.md`
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from enum import Enum
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from kvproxy.base.settings.compose import composed
from kvproxy.base.settings.model import Model, parse_duration_s, parse_size_bytes, read_descriptions
from kvproxy.cluster.settings import ClusterSettings, PolicyName
from kvproxy.operate.config.decode import bare_type, keys_of
from kvproxy.operate.config.schema import Config
from kvproxy.proxy.filter_settings import filter_models, order_filters

_INTRODUCTION = f"""# Configuration reference

Generated from the schema by `python -m kvproxy.operate.config.reference`; do not edit by hand.

A file is YAML (or JSON). The shortest one names the engines:

```yaml
endpoints: [http://127.0.0.1:8000, http://127.0.0.1:8001]
```

`kvproxy check FILE` names everything that is wrong with a file at once; `kvproxy check --schema` prints a JSON Schema
for editors.

## Notation

- **Durations**: `50ms`, `2s`, `5m`, `1m30s`, `10 minutes`, or a number of seconds. **Sizes**: `64KiB`, `8MiB`, `1GB`,
  or bytes.
- **Environment**: `${{VAR}}` and `${{VAR:-default}}` in any value; `$$` is a dollar sign. They are replaced after the
  file was parsed, so a value can never change its structure. Inside `{{ }}` or `[ ]` put them in quotes.
- **Secrets** are written `${{VAR}}`, or `{{file: /run/secrets/name}}`: the file's text without surrounding white space.
  They never appear in messages, logs or dumps.
- **Scalars** follow YAML 1.2: only `true` and `false` are booleans. Anchors and `<<` merges work.
- **Listeners**: `listen: 127.0.0.1:8888`, `listen: :8888` (every interface), `listen: "[::1]:8888"`; the same for
  `admin`, and `admin: false` turns it off.
- **Endpoints**: a list of mappings, of URLs or of `id=url`, or a mapping `id: url` or `id: {{url: ..., ...}}`. An
  endpoint without an id gets its `host:port`.
- **One cluster**: the fields of a cluster (`endpoints`, `policy`, `health`, ...) at the top level are short for
  `clusters.default`.
- **Filters**: without `filters` the chain is {", ".join(f"`{name}`" for name in order_filters())}.
  A mapping, `filters: {{auth: {{keys: [...]}}}}`, adds filters to it at their places and sets those it has. A list of
  names and of `name: {{settings}}` is the whole chain ([order](filters.md)).

A Dubbo-go-Pixiu file is recognised by its shape and loads as it is, where all it uses exists here
([migrating](migrating.md)); what is done otherwise is logged once at start.
"""


def render_reference() -> str:
    """Return the whole page."""
    lines = [_INTRODUCTION, "## Top level", "", _sentence(Config), "", *_table(composed(Config), "")]
    lines += ["", "## Filters", "", "Each filter's settings, below its name in `filters`."]
    for name, kind in sorted(filter_models().items()):
        lines += ["", f"### {name}", "", _sentence(kind), "", *_table(kind, "")]
    return "\n".join(lines).rstrip() + "\n"


def _sentence(model: type[Model]) -> str:
    return " ".join((model.__doc__ or "").split())


def _table(model: type[Model], prefix: str) -> list[str]:
    rows = [f"| {' | '.join(row)} |" for row in _rows(model, prefix)]
    return ["| Key | Type | Default | Meaning |", "|---|---|---|---|", *rows]


def _rows(model: type[Model], prefix: str) -> Iterator[tuple[str, str, str, str]]:
    descriptions = read_descriptions(model)
    for name, field in model.model_fields.items():
        path = prefix + name
        meaning = " ".join(descriptions.get(name, "").split()).replace("|", "\\|")
        kind = _type(field)
        if name != "policy":  # the enum's members are listed there
            kind = kind.replace(_name(PolicyName), "a policy, as above")
        yield f"`{path}`", kind, _default(field), meaning
        inner, suffix = _inner(field.annotation)
        if inner is not None:
            yield from _rows(inner, f"{path}{suffix}.")


def _inner(annotation: Any) -> tuple[type[Model] | None, str]:
    """Return the model a field holds, and how its elements are written: `[]` for lists, `.NAME` for mappings."""
    kind = bare_type(annotation)
    suffix = ""
    if get_origin(kind) is tuple:
        kind = bare_type(get_args(kind)[0])
        suffix = "[]"
    elif get_origin(kind) is not None and get_origin(kind) is not Literal:
        kind = bare_type(get_args(kind)[1])
        suffix = ".NAME"
    is_model = isinstance(kind, type) and issubclass(kind, Model) and kind.__name__ != "FilterSpec"
    return (kind, suffix) if is_model else (None, "")


def _is(field: FieldInfo, parse: Any) -> bool:
    return any(getattr(item, "func", None) is parse for item in field.metadata)


def _type(field: FieldInfo) -> str:
    if _is(field, parse_duration_s):
        return "duration"
    if _is(field, parse_size_bytes):
        return "size"
    return _name(bare_type(field.annotation)) + _bounds(field)


def _name(kind: Any) -> str:
    origin = get_origin(kind)
    if origin is Literal:
        return " \\| ".join(f"`{choice}`" for choice in get_args(kind))
    if origin in (Union, UnionType):
        return " \\| ".join(_name(bare_type(one)) for one in get_args(kind) if get_args(one) != ("",))
    if origin is tuple:
        return f"list of {_name(bare_type(get_args(kind)[0]))}"
    if origin is not None:
        return f"mapping of {_name(bare_type(get_args(kind)[1]))}"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return " \\| ".join(f"`{member.value}`" for member in kind)
    if isinstance(kind, type) and issubclass(kind, Model):
        return "filter" if kind.__name__ == "FilterSpec" else "mapping"
    names: Mapping[Any, str] = {str: "text", int: "integer", float: "number", bool: "boolean", SecretStr: "secret"}
    return names[kind]


def _bounds(field: FieldInfo) -> str:
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    parts = [
        f"{sign} {getattr(item, name):g}"
        for item in field.metadata
        for name, sign in signs.items()
        if getattr(item, name, None) is not None
    ]
    return f" ({', '.join(parts)})" if parts else ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, Model):
        return ""
    if value is None or value in ((), {}, ""):
        return "none"
    if _is(field, parse_duration_s):
        return f"`{_duration(value)}`"
    if _is(field, parse_size_bytes):
        return f"`{_size(value)}`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return ", ".join(f"`{item}`" for item in (value if isinstance(value, tuple) else (value,)))


def _duration(seconds: float) -> str:
    for unit, length in (("h", 3600), ("m", 60), ("s", 1)):
        if seconds >= length and seconds % length == 0:
            return f"{seconds / length:g}{unit}"
    return f"{seconds * 1000:g}ms" if seconds else "0"


def _size(value: int) -> str:
    for unit, length in (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if value >= length and value % length == 0:
            return f"{value // length}{unit}"
    return str(value)


_ADDRESS = {"type": "string", "pattern": r"^(.*:)?\d{1,5}$|\$\{", "description": "host:port, :port or [ipv6]:port"}
_PORT = {"type": "integer", "minimum": 0, "maximum": 65535}
_PLACEHOLDER = {"type": "string", "pattern": r"\$\{"}
_TYPED = {"integer", "number", "boolean"}


def file_schema() -> dict[str, Any]:
    """Draft 2020-12 schema of a configuration file as a person writes it."""
    schema = composed(Config).model_json_schema()
    definitions = schema["$defs"]
    for name, kind in filter_models().items():
        settings = kind.model_json_schema(ref_template="#/$defs/{model}")
        definitions.update(settings.pop("$defs", {}))
        definitions[f"filter_{name}"] = settings
    for name, definition in definitions.items():
        definitions[name] = _with_placeholders(definition)
    _endpoints(definitions)
    properties = _with_placeholders(schema["properties"])
    for key in keys_of(composed(ClusterSettings)):
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
    """Describe `endpoints`: a list of endpoints or `id=url` texts, or a mapping of ids to endpoints or urls."""
    endpoint = definitions["EndpointSettings"]
    endpoint["required"] = ["url"]
    one = {"anyOf": [{"$ref": "#/$defs/EndpointSettings"}, {"type": "string", "minLength": 1}]}
    listed = definitions["ClusterSettings"]["properties"]["endpoints"]
    outer: dict[str, Any] = {key: listed[key] for key in ("description", "default") if key in listed}
    forms = [{"type": "array", "items": one}, {"type": "object", "additionalProperties": one}]
    definitions["ClusterSettings"]["properties"]["endpoints"] = {**outer, "anyOf": forms}


def _filters(listed: dict[str, Any]) -> dict[str, Any]:
    """Describe `filters`: a mapping that adds to the default chain, or a list of names and one-key mappings;
    third-party filters may have any settings."""
    settings = {name: {"anyOf": [{"$ref": f"#/$defs/filter_{name}"}, {"type": "null"}]} for name in filter_models()}
    added = {"type": "object", "properties": settings}
    mapping = {**added, "minProperties": 1, "maxProperties": 1}
    name = {"anyOf": [{"enum": sorted(filter_models())}, {"type": "string", "minLength": 1}]}
    listing = {"type": "array", "items": {"anyOf": [name, mapping]}}
    return {"description": listed["description"], "anyOf": [added, listing]}


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


if __name__ == "__main__":
    sys.stdout.write(render_reference())
