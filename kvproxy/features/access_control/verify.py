"""Checks of the settings of auth, cors and rate_limit."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvproxy.base.settings.paths import Finding, Path, error_at, missing_file, warning_at
from kvproxy.features.access_control.settings import AuthSettings, CorsSettings, RateLimitSettings
from kvproxy.operate.config.schema import Config
from kvproxy.operate.feature import find_filters


def find_faults(config: Config) -> Iterator[Finding]:
    """Yield the faults of each of the filters that is in the chain."""
    for at, auth in find_filters(config, AuthSettings):
        yield from _auth(auth, at)
    for at, cors in find_filters(config, CorsSettings):
        yield from _cors(cors, at)
    for at, limits in find_filters(config, RateLimitSettings):
        yield from _rate_limit(limits, at)


def _auth(settings: AuthSettings, at: Path) -> Iterator[Finding]:
    if not settings.keys and not settings.file:
        yield error_at((*at, "keys"), "auth has neither keys nor a file: it would refuse everything", absence=True)
    if settings.file:
        yield from missing_file((*at, "file"), settings.file)
    seen: set[str] = set()
    for index, key in enumerate(settings.keys):
        if key.key.get_secret_value() in seen:
            yield error_at((*at, "keys", index, "key"), "the same key is given twice: its owner would be ambiguous")
        seen.add(key.key.get_secret_value())
    for index, path in enumerate(settings.exempt_paths):
        if not path.startswith("/"):
            yield error_at((*at, "exempt_paths", index), "must start with /")


def _cors(settings: CorsSettings, at: Path) -> Iterator[Finding]:
    if not settings.allow_origins and not settings.allow_origin_regex:
        yield error_at((*at, "allow_origins"), "cors allows no origin")
    if settings.allow_credentials and "*" in settings.allow_origins:
        yield error_at((*at, "allow_credentials"), "with the origin * any page could act with a user's credentials")
    try:
        re.compile(settings.allow_origin_regex)
    except re.error as fault:
        yield error_at((*at, "allow_origin_regex"), f"not a regular expression: {fault.msg}")


def _rate_limit(settings: RateLimitSettings, at: Path) -> Iterator[Finding]:
    if not settings.requests_per_minute and not settings.tokens_per_minute:
        yield warning_at((*at, "requests_per_minute"), "rate_limit has no limit")
