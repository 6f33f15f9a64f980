"""Its part of `kvproxy status`."""

from __future__ import annotations

import pytest

from kvproxy.features.exchange.operated import show_peers


@pytest.mark.parametrize(("peers", "said"), [((), "0 other processes"), (("w/0", "w/1"), "1 other process:")])
def test_a_process_is_no_other_than_itself(peers: tuple[str, ...], said: str) -> None:
    """Workers that answer together list each other, and so all of them."""
    figures = {"alive": True, "gaps": 0, "lost": 0, "lost_last_minute": 0, "index_blocks": 0, "heard_s_ago": 0.1}
    listed = [{"origin": one, "lag_p50_s": 0.001, "lag_p99_s": 0.001, **figures} for one in peers]
    sync = {"origin": "w/0", "status": "synced", "consistency_ratio": 1.0, "links": {}, "peers": listed}
    sentence, table = show_peers({"sync": sync}, colour=False).blocks
    assert said in sentence[0]
    assert len(table) == (1 + len(peers) if peers else 0)


def test_one_that_decides_alone_shows_nothing() -> None:
    """Nor does one without the feature."""
    assert not show_peers({"sync": None}, colour=False).blocks
    assert not show_peers({}, colour=False).blocks
