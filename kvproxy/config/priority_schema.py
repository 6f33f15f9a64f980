"""What engines are told about the order of the requests that wait in them."""

from __future__ import annotations

from enum import StrEnum


class EnginePriorityMode(StrEnum):
    """Whether forwarded requests carry `priority`, by which an engine orders those that wait in it."""

    OFF = "off"  # bodies stay as clients sent them
    ON = "on"  # the engines are started for it
    AUTO = "auto"  # as long as none is found to ignore it


class PriorityOrder(StrEnum):
    """Which number an engine admits first."""

    LOWEST_FIRST = "lowest_first"  # vLLM with `--scheduling-policy priority`
    HIGHEST_FIRST = "highest_first"  # SGLang with `--enable-priority-scheduling`
