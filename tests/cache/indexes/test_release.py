"""Memory that an index no longer needs is freed at once: a table may hold a hundred megabytes."""

from __future__ import annotations

import gc
import weakref

import pytest

from kvproxy.cache.indexes.precise import PreciseIndex
from tests.cache.indexes.support import A, stored


@pytest.mark.parametrize("how", ["left", "dropped"])
def test_a_table_needs_no_collector_to_go(how: str) -> None:
    """Neither that of an endpoint that left, once swept, nor those of an index that is gone."""
    index = PreciseIndex()
    index.apply_events(A, 0, [stored(tuple(range(2000)))])
    (table,) = index.tables.by_source.values()
    runs = weakref.ref(table._runs)
    gc.disable()
    try:
        del table
        if how == "left":
            index.remove_endpoint(A)
            assert index.sweep_rows(100_000)
        else:
            del index
        assert runs() is None
    finally:
        gc.enable()
