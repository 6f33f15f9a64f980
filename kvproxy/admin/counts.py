"""Counters of the catalogue, read as numbers."""

from __future__ import annotations

from kvproxy.metrics.collectors import Counter


def by_label(counter: Counter, label: str) -> dict[str, float]:
    """The counter's value by one label, added up over the others."""
    found: dict[str, float] = {}
    for metric in counter.collect():
        for sample in metric.samples:
            if sample.name.endswith("_total"):
                key = sample.labels[label]
                found[key] = found.get(key, 0.0) + sample.value
    return found


def total(counter: Counter) -> float:
    """The counter's value over all labels."""
    samples = (sample for metric in counter.collect() for sample in metric.samples)
    return sum(sample.value for sample in samples if sample.name.endswith("_total"))
