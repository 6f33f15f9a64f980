"""Adapters in use, as vLLM's metrics say it: one line a combination ever seen, the newest counts."""

from __future__ import annotations

import pytest

from kvproxy.clients.engine_metrics import parse_engine_metrics
from kvproxy.clients.lora_use import MAX_NAMES, LoraUse, parse_lora_use


def line(running: str, waiting: str, at: float | str, slots: str = "2") -> str:
    labels = f'max_lora="{slots}",running_lora_adapters="{running}",waiting_lora_adapters="{waiting}"'
    return f"vllm:lora_requests_info{{{labels}}} {at}\n"


@pytest.mark.parametrize(
    ("text", "use"),
    [
        ("", None),
        ("vllm:num_requests_running 3\n", None),
        (line("", "", 1.0), LoraUse(2, frozenset(), frozenset())),
        (line("a", "", 10.0) + line("b", "c", 20.0), LoraUse(2, frozenset("b"), frozenset("c"))),
        (line("b", "c", "1.7e9") + line("a", "", 10.0), LoraUse(2, frozenset("b"), frozenset("c"))),
        (line("a,b", "a,c", 10.0), LoraUse(2, frozenset("ab"), frozenset("ac"))),
        (line("a", "", "NaN") + line("b", "", "inf"), None),
        (line("a", "", "1e5e5") + line("b", "", 5.0), LoraUse(2, frozenset("b"), frozenset())),
        (line("a", "", 5.0, slots="many"), LoraUse(0, frozenset("a"), frozenset())),
        (line("a", "", 5.0, slots="9" * 40), LoraUse(0, frozenset("a"), frozenset())),
    ],
)
def test_the_newest_line_counts(text: str, use: LoraUse | None) -> None:
    assert parse_lora_use(text.encode()) == use
    assert parse_engine_metrics(text.encode()).lora == use


def test_data_parallel_ranks_write_in_turn() -> None:
    """Lines of the same two seconds are the ranks' own, so that none flickers; older ones are over."""
    text = line("a", "", 100.0) + line("b", "", 101.5) + line("", "", 101.9) + line("old", "old", 99.0)
    assert parse_lora_use(text.encode()) == LoraUse(2, frozenset("ab"), frozenset())


def test_names_are_bounded() -> None:
    names = ",".join(f"n{number}" for number in range(2 * MAX_NAMES))
    use = parse_lora_use(line(names, "", 1.0).encode())
    assert use is not None
    assert len(use.running) == MAX_NAMES
