"""Canonical form of the configuration, made from its short forms or from another program's file.

`listen: host:port`, `admin: false`, the fields of `clusters.default` at the top level, `endpoints` as a mapping or as
`id=url` texts, filters as a mapping that adds to the default chain, or listed as names or one-key mappings. Unreadable
parts are left for the model to refuse."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from urllib.parse import urlsplit

from kvproxy.base.errors import Problem
from kvproxy.base.settings.compose import composed
from kvproxy.base.settings.model import Model
from kvproxy.base.settings.paths import Path, dotted_path
from kvproxy.cluster.settings import ClusterSettings
from kvproxy.operate.config.decode import UNKNOWN_KEY, Origins, decode_model, keys_of
from kvproxy.proxy.filter_settings import order_filters

_FALSE = {"false", "off", "no"}
_NOT_IN_IDS = re.compile(r"[^A-Za-z0-9._:-]")
_MAX_ID = 120

K = TypeVar("K", bound=Model)


@dataclass(slots=True)
class Canonical:
    """A file in the model's own form; the filters apart, as (name, raw settings, written path)."""

    data: dict[str, Any]
    filters: list[tuple[str, Any, Path]] = field(default_factory=list)
    origins: Origins = field(default_factory=Origins)
    problems: list[Problem] = field(default_factory=list)
    lenient: bool = False
    """Unknown filter settings are warnings."""
    _known: set[str] = field(default_factory=set)

    def add_error(self, path: Path, message: str, hint: str = "") -> None:
        """Add an error at a written path."""
        self.add_problem(Problem(dotted_path(path), message, hint))

    def begin_with(self, known: Sequence[Problem]) -> None:
        """Begin with problems found before; further ones about the same values are dropped."""
        self.problems[:0] = known
        self._known = {problem.path for problem in known}
        self.problems[len(known) :] = [one for one in self.problems[len(known) :] if one.path not in self._known]

    def add_problem(self, problem: Problem, *, tolerable: bool = False) -> None:
        """Add a problem; a tolerable one is only a warning if the form is lenient."""
        if problem.path in self._known:
            return
        relaxed = self.lenient and tolerable
        self.problems.append(replace(problem, severity="warning") if relaxed else problem)


class Translation:
    """The form being built. With `lenient`, what we do not have is a warning instead of an error."""

    def __init__(self, *, lenient: bool) -> None:
        self.form = Canonical({}, lenient=lenient)

    def decode_part(self, kind: type[K], raw: Mapping[str, Any] | None, at: Path) -> K | None:
        """`raw` (nothing: defaults) as `kind`; its problems are kept."""
        decoded = decode_model(kind, raw or {}, Origins([((), at)]))
        for problem in decoded.problems:
            self.form.add_problem(problem, tolerable=problem.message == UNKNOWN_KEY)
        return decoded.value

    def set_value(self, section: str, key: str, value: Any, at: Path) -> None:
        """Set one of our settings, written at `at`."""
        self.form.data.setdefault(section, {})[key] = value
        self.form.origins.add_move((section, key), at)

    def add_note(self, at: Path, message: str) -> None:
        """We knowingly do this otherwise."""
        self.form.add_problem(Problem(dotted_path(at), message, severity="note"))

    def add_warning(self, at: Path, message: str, hint: str = "") -> None:
        """Add a warning: the file loads, but probably differs from the intention."""
        self.form.add_problem(Problem(dotted_path(at), message, hint, "warning"))

    def add_error(self, at: Path, message: str, hint: str = "") -> None:
        """Add an error, unless the value was already found to be wrong."""
        if all(problem.path != dotted_path(at) for problem in self.form.problems):
            self.form.add_error(at, message, hint)

    def add_unsupported(self, at: Path, message: str, hint: str = "") -> None:
        """Add a setting that another dialect has and this one lacks."""
        self.form.add_problem(Problem(dotted_path(at), message, hint), tolerable=True)


def to_canonical_form(raw: dict[str, Any]) -> Canonical:
    """Return the canonical form of a native file's top-level mapping, which is not changed."""
    form = Canonical(dict(raw))
    for key in ("listen", "admin"):
        if key in raw:
            form.data[key] = _listener(form, key, raw[key])
    _filters(form, form.data.pop("filters", None))
    _clusters(form)
    return form


def _listener(form: Canonical, key: str, value: Any) -> Any:
    """`host:port`, `:port` (every interface), `[::1]:port`, a bare port, or `false` for the admin listener."""
    if key == "admin" and (value is False or (isinstance(value, str) and value.casefold() in _FALSE)):
        return {"enabled": False}
    if value is None:
        form.add_error((key,), "has no value", "`host:port`, or a mapping of settings")
        return {}
    if isinstance(value, bool) or not isinstance(value, str | int):
        return value
    try:
        host, port = split_address(str(value))
    except ValueError as error:
        form.add_error((key,), str(error))
        return {}
    for name in ("host", "port"):
        form.origins.add_move((key, name), (key,))
    return {"port": port} if host is None else {"host": host, "port": port}


def _filters(form: Canonical, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, dict):
        _added_filters(form, value)
        return
    if not isinstance(value, list):
        hint = "`name: {settings}` of filters to add to the default chain, or the whole chain as a list"
        form.add_error(("filters",), "must be a mapping or a list of filters", hint)
        return
    for index, entry in enumerate(value):
        if isinstance(entry, str):
            form.filters.append((entry, None, ("filters", index)))
        elif isinstance(entry, dict) and len(entry) == 1:
            name, settings = next(iter(entry.items()))
            form.filters.append((name, settings, ("filters", index, name)))
        else:
            form.add_error(("filters", index), "must be a filter's name, or one `name: {settings}`")


def _added_filters(form: Canonical, given: Mapping[str, Any]) -> None:
    """Add these filters to the default chain or set them in it."""
    for name in order_filters(given):
        written: Path = ("filters", name) if name in given else ("filters",)
        form.filters.append((name, given.get(name), written))


def _clusters(form: Canonical) -> None:
    """Gather the top level's cluster fields into `clusters.default`, and spell every cluster's endpoints out."""
    given = form.data.get("clusters")
    if given is not None and not isinstance(given, dict):
        form.add_error(("clusters",), "must be a mapping of names to clusters")
        given = None
    clusters = dict(given or {})
    short = [key for key in (*keys_of(composed(ClusterSettings)), *ClusterSettings.retired) if key in form.data]
    default = clusters.get("default", {})
    if short and isinstance(default, dict):
        default = dict(default)
        for key in short:
            if key in default:
                form.add_error((key,), "given here and in clusters.default")
            default[key] = form.data[key]
            form.origins.add_move(("clusters", "default", key), (key,))
        if "default" not in clusters:
            form.origins.add_move(("clusters", "default", "endpoints"), ("endpoints",))
        clusters["default"] = default
    for key in short:
        del form.data[key]
    for name, cluster in clusters.items():
        if isinstance(cluster, dict) and "endpoints" in cluster:
            at: Path = ("clusters", name, "endpoints")
            clusters[name] = {**cluster, "endpoints": _endpoints(form, cluster["endpoints"], at)}
    form.data["clusters"] = clusters


def _endpoints(form: Canonical, value: Any, at: Path) -> Any:
    if isinstance(value, list):
        return [_endpoint(item) for item in value]
    if not isinstance(value, dict):
        return value
    written = form.origins.find_written(at)
    items = []
    for index, (name, item) in enumerate(value.items()):
        form.origins.add_move((*at, index), (*written, name))
        if isinstance(item, dict) and "id" in item and item["id"] != name:
            form.add_error((*written, name, "id"), "the endpoint's id is already given by its key")
        items.append({**item, "id": name} if isinstance(item, dict) else {"id": name, "url": item})
    return items


def _endpoint(item: Any) -> Any:
    if isinstance(item, str):
        return parse_endpoint(item)
    if isinstance(item, dict) and "id" not in item and isinstance(item.get("url"), str):
        return {"id": id_of_url(item["url"]), **item}
    return item


def parse_endpoint(text: str) -> dict[str, str]:
    """`id=url`, or a url whose host:port becomes the id."""
    name, equals, url = text.partition("=")
    if equals and "/" not in name and "?" not in name:
        return {"id": name.strip(), "url": url.strip()}
    return {"id": id_of_url(text), "url": text.strip()}


def id_of_url(url: str) -> str:
    """Return `host:port` of a url, without credentials; IPv6 without brackets and with a leading digit (`0::1:8000`).

    A url without a host gets a name all the same; the missing host is reported once, about the url."""
    try:
        netloc = urlsplit(url.strip() if "://" in url else f"//{url.strip()}").netloc.rpartition("@")[2]
    except ValueError:
        netloc = ""
    name = _NOT_IN_IDS.sub("", netloc)[:_MAX_ID] or "endpoint"
    return name if name[0].isalnum() else f"0{name}"


def split_address(text: str) -> tuple[str | None, int]:
    """Host and port of `host:port`, `[::1]:port`, `:port` (every interface) or `port` (host None: the default).

    Raises ValueError for anything else.
    """
    host, colon, port = text.strip().rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not port.isascii() or not port.isdigit() or int(port) > 65535 or (":" in host and not bracketed) or host == "[]":
        raise ValueError("expected host:port, :port, [ipv6]:port or a port number up to 65535")
    if not colon:
        return None, int(port)
    return (host.strip("[]") if host else "0.0.0.0"), int(port)
