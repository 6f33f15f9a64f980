"""Collects the names: of metrics, settings, filters, commands, headers, admin routes and fields of receipts."""

from __future__ import annotations

import argparse
import re
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvproxy.app import Proxy
from kvproxy.cli import _parser
from kvproxy.operate.config.load import load_config
from kvproxy.operate.config.reference import file_schema
from kvproxy.operate.metrics.reference import describe_metrics
from kvproxy.operate.receipts.receipt import receipt_type

PACKAGE = Path(__file__).parents[2] / "kvproxy"


def metric_names() -> Iterator[str]:
    """`counter kvproxy_picks_total{cluster,policy,reason}`."""
    for described in describe_metrics().values():
        for one in described:
            yield f"{one.kind} {one.name}{{{','.join(sorted(one.labels))}}}"


def setting_names() -> Iterator[str]:
    """`clusters.NAME.policy = "kv_aware"`: path and default, as the JSON Schema has them."""
    schema = file_schema()
    definitions = schema["$defs"]
    yield from sorted(set(_keys(schema, "", definitions)))
    for name, definition in definitions.items():
        if name.startswith("filter_"):
            yield from sorted(set(_keys(definition, f"filters.{name.removeprefix('filter_')}.", definitions)))


def _keys(schema: Mapping[str, Any], at: str, definitions: Mapping[str, Any]) -> Iterator[str]:
    if "$ref" in schema:
        yield from _keys(definitions[schema["$ref"].rpartition("/")[2]], at, definitions)
    for choice in (*schema.get("anyOf", ()), *schema.get("allOf", ())):
        yield from _keys(choice, at, definitions)
    for key, below in schema.get("properties", {}).items():
        default = below.get("default")
        yield f"{at}{key}" + ("" if default is None or isinstance(default, dict) else f" = {default!r}")
        yield from _keys(below, f"{at}{key}.", definitions)
    if isinstance(schema.get("additionalProperties"), dict):
        yield from _keys(schema["additionalProperties"], f"{at}NAME.", definitions)
    if "items" in schema:
        yield from _keys(schema["items"], f"{at.removesuffix('.')}[].", definitions)


def command_names() -> Iterator[str]:
    """`serve --workers`, `ledger FILE`."""
    for action in _parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command, parser in action.choices.items():
                yield command
                yield from (f"{command} {argument}" for argument in _arguments(parser))


def _arguments(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings or [str(action.metavar or action.dest)]


def header_names() -> Iterator[str]:
    """`x-kvproxy-endpoint`."""
    for path in PACKAGE.rglob("*.py"):
        yield from re.findall(r"x-kvproxy-[a-z-]*[a-z]", path.read_text())


def route_names() -> Iterator[str]:
    """`GET /live`, of the admin listener."""
    proxy = Proxy(load_config({"endpoints": ["http://127.0.0.1:9"]}))
    for route in proxy.admin.app.routes:  # type: ignore[attr-defined]
        yield from (f"{method} {route.path}" for method in route.methods if method != "HEAD")


def receipt_names() -> Iterator[str]:
    """`attempts.candidates.id`."""
    yield from _fields(receipt_type(), "")


def _fields(kind: Any, at: str) -> Iterator[str]:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        for field in msgspec.structs.fields(kind):
            yield at + field.encode_name
            yield from _fields(field.type, f"{at}{field.encode_name}.")
    for one in typing.get_args(kind):
        yield from _fields(one, at)


FILES = {
    "metrics": metric_names,
    "settings": setting_names,
    "commands": command_names,
    "headers": header_names,
    "routes": route_names,
    "receipts": receipt_names,
}
