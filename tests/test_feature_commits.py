"""Files outside a feature's folder that changes to it touch."""

from __future__ import annotations

from tests.feature_commits import find_changes


def test_files_elsewhere_are_counted_by_kind() -> None:
    """All, those that are no records, and those of the package."""
    tests = ["tests/features/leases/test_proxy.py", "tests/real/leases/test_leases.py"]
    own = ["kvproxy/features/leases/leases.py", *tests]
    (change,) = find_changes([["Pin less", *own, "CHANGELOG.md", "docs/kvcache.md", "kvproxy/cache/state.py"]])
    assert (change.feature, len(change.outside), change.written, change.code) == ("leases", 3, 2, 1)


def test_a_commit_about_several_features_or_none_is_no_change_to_one() -> None:
    """It says nothing about where one feature's code lies."""
    several = ["Rename", "kvproxy/features/leases/leases.py", "kvproxy/features/warming/warmer.py"]
    assert list(find_changes([several, ["Fix", "kvproxy/app.py"], ["List", "kvproxy/features/__init__.py"]])) == []
