"""Base of every configuration model, and what people write in one: names, durations, sizes, secrets."""

from __future__ import annotations

import ast
import inspect
import itertools
import math
import re
import textwrap
from collections.abc import Iterator, Mapping
from decimal import Decimal
from functools import cache
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    PlainSerializer,
    SecretStr,
    StringConstraints,
    WithJsonSchema,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

Name = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@-]*$")]
EndpointName = Annotated[
    str, StringConstraints(min_length=1, max_length=512, pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@-]*$")
]
"""Also a DNS name (253 characters) with an address or a rank."""
Port = Annotated[int, Field(ge=0, le=65535)]
Fraction = Annotated[float, Field(ge=0, le=1)]
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]*")


def _check_header_name(name: str) -> str:
    if _HEADER_NAME.fullmatch(name) is None:
        raise ValueError("no HTTP header has such a name: letters, digits and - are usual")
    return name


HeaderName = Annotated[str, AfterValidator(_check_header_name)]
"""Name of an HTTP header, or none."""


class Model(BaseModel):
    """Strict and immutable: an unknown key is an error, a loaded configuration never changes."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, allow_inf_nan=False)

    #: Settings of earlier versions with the reason why they went: a file that has one gets a warning.
    retired: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return the JSON Schema with the fields' docstrings."""
        shown = handler(schema)
        properties = handler.resolve_ref_schema(shown).get("properties", {})
        for name, text in read_descriptions(cls).items():
            properties[name].setdefault("description", text)
        return shown


@cache
def read_descriptions(model: type[Model]) -> Mapping[str, str]:
    """Return the docstrings of a model's fields. They are read from the source on demand: pydantic would do it
    at every start."""
    found: dict[str, str] = {}
    for kind in reversed(model.__mro__):
        if issubclass(kind, Model):
            found.update(_docstrings(kind))
    return {name: text for name, text in found.items() if name in model.model_fields}


def _docstrings(kind: type) -> Iterator[tuple[str, str]]:
    """Yield each field of one class with its docstring; nothing where the source does not ship."""
    try:
        [statement] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    except OSError:
        return
    body = statement.body if isinstance(statement, ast.ClassDef) else []
    for field, text in itertools.pairwise(body):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(found))):
                yield name, inspect.cleandoc(found)


_NUMBER = re.compile(r"\d+(\.\d*)?([eE][+-]?\d+)?")
_MAX_SECRET_BYTES = 64 * 1024
_DURATION_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_UNIT_WORDS = {
    "sec": "s",
    "second": "s",
    "min": "m",
    "minute": "m",
    "hr": "h",
    "hour": "h",
    "day": "d",
    "msec": "ms",
    "millisecond": "ms",
}
_UNIT_TEXT = "|".join([*(f"{word}s?" for word in sorted(_UNIT_WORDS, key=len, reverse=True)), *_DURATION_UNITS])
_DURATION_PART = re.compile(rf"(\d+(?:\.\d+)?)\s*({_UNIT_TEXT})(?![a-zµ])\s*")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?b?)", re.IGNORECASE)
_SIZE_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_BINARY_UNITS = {"k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}


def parse_duration_s(value: Any) -> float:
    """Seconds from `50ms`, `2s`, `1m30s` (Go's form too), `10 minutes` or a bare number of seconds.

    Raises ValueError for anything else, negative and non-finite numbers included.
    """
    if not isinstance(value, int | float | str) or isinstance(value, bool):
        raise ValueError("expected a duration like 50ms, 2s or 5m")
    if isinstance(value, int | float):
        seconds = float(value)
    else:
        text = value.strip()
        parts = list(_DURATION_PART.finditer(text))
        if _NUMBER.fullmatch(text):
            seconds = float(text)
        elif parts and "".join(part[0] for part in parts) == text:
            seconds = math.fsum(float(part[1]) * _unit_s(part[2]) for part in parts)
        else:
            raise ValueError(f"expected a duration like 50ms, 2s or 5m, not {value!r}")
    if not math.isfinite(seconds) or seconds < 0:
        raise ValueError("a duration is finite and not negative")
    return seconds


def _unit_s(unit: str) -> float:
    short = unit if unit in _DURATION_UNITS else _UNIT_WORDS[unit.removesuffix("s")]
    return _DURATION_UNITS[short]


def parse_size_bytes(value: Any) -> int:
    """Bytes from `8MiB`, `64KB`, `1g` or a bare number of bytes. Raises ValueError for anything else."""
    if not isinstance(value, int | str) or isinstance(value, bool):
        raise ValueError("expected a size like 64KiB or 8MiB")
    if isinstance(value, int):
        size = value
    else:
        match = _SIZE.fullmatch(value.strip())
        if match is None:
            raise ValueError(f"expected a size like 64KiB or 8MiB, not {value!r}")
        unit = match[2].lower().removesuffix("b")
        factor = _BINARY_UNITS[unit[0]] if unit.endswith("i") and len(unit) == 2 else _SIZE_UNITS.get(unit, 0)
        if not factor:
            raise ValueError(f"unknown size unit in {value!r}")
        size = int(Decimal(match[1]) * factor)
    if size < 0:
        raise ValueError("a size is not negative")
    return size


Duration = Annotated[
    float,
    BeforeValidator(parse_duration_s),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "pattern": rf"^(\d+(\.\d+)? ?({_UNIT_TEXT}) ?)+$"},
                {"type": "number", "minimum": 0},
            ]
        }
    ),
]
"""Seconds, written as `50ms`, `2s`, `1m30s`."""

Size = Annotated[
    int,
    BeforeValidator(parse_size_bytes),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "pattern": r"^\d+(\.\d+)? ?([kKmMgGtT]i?)?[bB]?$"},
                {"type": "integer", "minimum": 0},
            ]
        }
    ),
]
"""Bytes, written as `64KiB`, `8MiB`."""


def read_secret(value: Any) -> Any:
    """Return a secret as written, or the text of `{file: PATH}`. Raises ValueError that never quotes it."""
    if isinstance(value, dict):
        if set(value) != {"file"} or not isinstance(value["file"], str):
            raise ValueError("expected a secret, or a mapping with just `file: PATH`")
        value = _secret_from(value["file"])
    if isinstance(value, str | SecretStr):
        text = value.get_secret_value() if isinstance(value, SecretStr) else value
        if not text:
            raise ValueError("the secret is empty; leave the key out to have none")
        if not text.isprintable():
            raise ValueError("the secret contains a line break or another control character")
    return value


def _secret_from(path: str) -> str:
    from kvproxy.base.timed_thread import read_file

    try:
        raw = read_file(path, max_bytes=_MAX_SECRET_BYTES)  # a pipe would hold the event loop
        text = raw.decode()
    except OSError as error:
        raise ValueError(f"cannot read the secret's file {path!r}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"the secret's file {path!r} is not UTF-8 text") from None
    if len(raw) > _MAX_SECRET_BYTES:
        raise ValueError(f"the secret's file {path!r} is larger than {_MAX_SECRET_BYTES} bytes")
    return text.strip()


Secret = Annotated[
    SecretStr,
    BeforeValidator(read_secret),
    PlainSerializer(lambda _: "**********", return_type=str),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {
                    "type": "object",
                    "properties": {"file": {"type": "string"}},
                    "required": ["file"],
                    "additionalProperties": False,
                },
            ]
        }
    ),
]
"""A credential, written out (usually `${VARIABLE}`) or as `{file: PATH}`: never printed by `repr`, dumps or errors."""


class BreakerSettings(Model):
    """Circuit breaker of one endpoint (or of one operation of a helper service)."""

    retired = {"half_open_max_calls": "two probes at once are let through while it is half open"}

    failure_threshold: int = Field(default=5, ge=1)
    """Failures in a row that open it."""
    recovery_timeout: Duration = 10.0
    """How long it stays open before it lets probes through."""
