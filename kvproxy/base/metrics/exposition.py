"""The page a scrape gets: the Prometheus text format, written in slices so that no request waits for it.

prometheus_client renders label by label and line by line: 50 ms of a held event loop for 64 endpoints. Our own metrics
keep the text of a series with places for its values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector


@runtime_checkable
class Texts(Protocol):
    """A collector that writes itself: its head, then piece by piece what belongs together."""

    def texts(self) -> Iterator[str]: ...


class Registry(CollectorRegistry):
    """Registry that can be walked collector by collector."""

    def __init__(self) -> None:
        super().__init__()
        self.collectors: list[Collector] = []

    def register(self, collector: Collector) -> None:
        """Show it from now on. ValueError when a name is taken."""
        super().register(collector)
        self.collectors.append(collector)


def family_head(name: str, kind: str, documentation: str) -> str:
    """Return the two lines before a metric's series."""
    text = documentation.replace("\\", r"\\").replace("\n", r"\n")
    return f"# HELP {name} {text}\n# TYPE {name} {kind}\n"


def label_text(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    """Return the labels of a series without their braces."""
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in zip(names, values, strict=True))


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
