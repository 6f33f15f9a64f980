"""The table of known faults of engines: field, affected versions, harm, advisory. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from types import MappingProxyType

Version = tuple[int, int, int, int]  # major, minor, patch, -1 for a pre-release and 0 for the release

_NUMBER = re.compile(r"v?(\d{1,9})\.(\d{1,9})(?:\.(\d{1,9}))?(.*)", re.DOTALL)
_PRE_RELEASE = re.compile(r"[._-]?(?:a|b|rc|dev|alpha|beta|pre)", re.IGNORECASE)
#: Version of untagged builds of a source tree, whatever they contain.
_UNTAGGED = (0, 1, 0, -1)
VLLM = "vLLM"


class Rule(StrEnum):
    """One fault of engines; a metric label."""

    CLIENT_REQUEST_ID = "client_request_id"
    CHAT_TEMPLATE = "chat_template"
    RESPONSES_CHAT_TEMPLATE = "responses_chat_template"
    PROMPT_LOGPROBS = "prompt_logprobs"
    PROMPT_EMBEDS = "prompt_embeds"
    HUGE_N = "huge_n"
    STRUCTURED_OUTPUT = "structured_output"
    KV_TRANSFER_PARAMS = "kv_transfer_params"
    UNREADABLE = "unreadable"  # cannot be checked for any of the others


@dataclass(frozen=True, slots=True)
class Advisory:
    """One row of the table. `fixed` is the first release without the fault, None: there is none yet. `source` is empty
    where no published text was found."""

    rule: Rule
    field: str
    harm: str
    fixed: Version | None
    since: Version = (0, 0, 0, 0)
    source: str = ""

    @property
    def affected(self) -> str:
        """The range of versions in words."""
        low = f">= {_shown(self.since)}, " if any(self.since) else ""
        return f"{low}< {_shown(self.fixed)}" if self.fixed is not None else f"{low}all so far"


def _shown(version: Version) -> str:
    return ".".join(map(str, version[:3]))


ADVISORIES: Mapping[Rule, Advisory] = MappingProxyType(
    {
        one.rule: one
        for one in (
            Advisory(
                Rule.CLIENT_REQUEST_ID,
                "header x-request-id on /score and /rerank",
                "two requests with one id share a cache entry: a client gets scores of another client's query",
                (0, 30, 0, 0),
                source="https://github.com/vllm-project/vllm/pull/51445",
            ),
            Advisory(
                Rule.CHAT_TEMPLATE,
                "chat_template, and chat_template or tokenize in chat_template_kwargs",
                "a client's template runs in the API server and can block it for all",
                (0, 11, 1, 0),
                since=(0, 5, 5, 0),
                source="CVE-2025-62426, GHSA-6fvq-23cw-5628, https://github.com/vllm-project/vllm/pull/25794",
            ),
            Advisory(
                Rule.RESPONSES_CHAT_TEMPLATE,
                "chat_template in chat_template_kwargs on /v1/responses",
                "a client's template runs in the API server and can block it for all",
                (0, 32, 0, 0),
            ),
            Advisory(
                Rule.PROMPT_LOGPROBS,
                "prompt_logprobs, or echo with logprobs",
                "with a KV connector that holds the prefix the engine ends",
                (0, 31, 0, 0),
                source="https://github.com/vllm-project/vllm/issues/50792",
            ),
            Advisory(
                Rule.PROMPT_EMBEDS,
                "prompt_embeds",
                "with a model that uses M-RoPE the engine ends",
                (0, 24, 0, 0),
                source="GHSA-33cg-gxv8-3p8g, https://github.com/vllm-project/vllm/pull/45252",
            ),
            Advisory(
                Rule.HUGE_N,
                "n",
                "a huge number blocks the API server and takes all its memory",
                (0, 19, 0, 0),
                source="GHSA-3mwp-wvh9-7528 (CVE-2026-34756)",
            ),
            Advisory(
                Rule.STRUCTURED_OUTPUT,
                "structured_outputs, response_format, guided_*",
                "a constraint that passes the API server and fails in the engine ends the engine",
                (0, 30, 0, 0),
                source="https://github.com/vllm-project/vllm/pull/45346, "
                "https://github.com/vllm-project/vllm/issues/43920, https://github.com/vllm-project/vllm/pull/47312",
            ),
            Advisory(
                Rule.KV_TRANSFER_PARAMS,
                "kv_transfer_params",
                "without all fields of the remote engine, or with several prompts, the engine ends",
                None,
                source="https://github.com/vllm-project/vllm/pull/56585, GHSA-6vh8-5j8f-m4vf, "
                "https://github.com/vllm-project/vllm/pull/51137",
            ),
        )
    }
)

#: An engine of unknown version may have all of them.
ALL_RULES = frozenset(ADVISORIES)


def parse_version(text: str) -> Version | None:
    """Return the version that an engine reports, as far as it orders; None: it cannot be read, or means nothing."""
    found = _NUMBER.fullmatch(text.strip())
    if found is None:
        return None
    pre = -1 if _PRE_RELEASE.match(found[4]) else 0
    version = (int(found[1]), int(found[2]), int(found[3] or 0), pre)
    return None if version == _UNTAGGED else version


@lru_cache(maxsize=256)
def open_rules(software: str | None) -> frozenset[Rule]:
    """Return the faults of an engine by what it reported; of one that has not been asked all, of an unknown version
    only that which costs nothing to mend."""
    if software is None:
        return ALL_RULES
    name, _, number = software.partition(" ")
    if not software:
        return frozenset({Rule.CLIENT_REQUEST_ID})
    version = parse_version(number)
    if name != VLLM or version is None:
        return frozenset()
    return frozenset(
        rule for rule, one in ADVISORIES.items() if one.since <= version and (one.fixed is None or version < one.fixed)
    )
