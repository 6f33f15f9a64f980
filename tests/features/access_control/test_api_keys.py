"""API keys: loading them, and finding whose a presented one is."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvproxy.base.errors import ConfigError
from kvproxy.features.access_control.auth import KeyRing, Owner, load_keys
from kvproxy.features.access_control.settings import ApiKey


def key(name: str, value: str) -> ApiKey:
    return ApiKey.model_validate({"name": name, "key": value})


def test_owner_of_each_key() -> None:
    """Every key finds its owner; anything else finds no owner."""
    ring = KeyRing([(Owner("alice"), "sk-a"), (Owner("bob"), "sk-b"), (Owner("bob"), "sk-b2")])
    assert [ring.owner(k) for k in (b"sk-a", b"sk-b", b"sk-b2")] == [Owner("alice"), Owner("bob"), Owner("bob")]
    assert [ring.owner(k) for k in (b"", b"sk-", b"sk-a ", b"SK-A", b"\xff")] == [None] * 5


def test_keys_from_configuration_and_file(tmp_path: Path) -> None:
    """Both places count; comments and blank lines do not; one name may have several keys."""
    file = tmp_path / "keys"
    file.write_text("# rotation\n\nbob: sk-b\n  team:web:  sk:b:2 \nalice: sk-a2\n")
    loaded = load_keys([key("alice", "sk-a")], str(file))
    names = [("alice", "sk-a"), ("bob", "sk-b"), ("team:web", "sk:b:2"), ("alice", "sk-a2")]
    assert loaded == [(Owner(name), value) for name, value in names]


def test_rights_belong_to_a_key_and_come_from_the_configuration_alone(tmp_path: Path) -> None:
    """The same client may have a key with more rights than its others."""
    file = tmp_path / "keys"
    file.write_text("alice: sk-plain\n")
    entry = ApiKey.model_validate({"name": "alice", "key": "sk-full", "debug": True, "trusted": True, "weight": 2})
    ring = KeyRing(load_keys([entry], str(file)))
    assert ring.owner(b"sk-full") == Owner("alice", debug=True, trusted=True, weight=2.0)
    assert ring.owner(b"sk-plain") == Owner("alice")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("sk-secret", "line 2: expected `name: key`"),
        ("bob:", "line 2: expected `name: key`"),
        ("no name!: sk-secret", "line 2: expected `name: key`"),
        ("bob: sk-secret more", "line 2: the key is empty or not visible ASCII"),
        ("bob: sk-sécret", "line 2: the key is empty or not visible ASCII"),
        ("bob: sk-a", "line 2: 'bob' has the same key as 'alice'"),
    ],
)
def test_a_bad_line_is_named_without_its_key(tmp_path: Path, line: str, message: str) -> None:
    """The line number and the reason, never the secret."""
    file = tmp_path / "keys"
    file.write_text(f"alice: sk-a\n{line}\n")
    with pytest.raises(ConfigError) as caught:
        load_keys([], str(file))
    assert message in str(caught.value)
    assert "sk-" not in str(caught.value)


def test_every_problem_at_once(tmp_path: Path) -> None:
    """One run shows all bad entries."""
    file = tmp_path / "keys"
    file.write_text("broken\nalso broken\n")
    with pytest.raises(ConfigError) as caught:
        load_keys([key("alice", "two words")], str(file))
    assert [problem.path for problem in caught.value.problems] == ["file", "file", "keys[0]"]


@pytest.mark.parametrize(("content", "why"), [(None, "No such file"), (b"\xff\xfe", "not UTF-8")])
def test_an_unreadable_file(tmp_path: Path, content: bytes | None, why: str) -> None:
    """Says which file and why."""
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=why):
        load_keys([], str(file))


def test_no_key_at_all() -> None:
    """A proxy no client could call is a mistake."""
    with pytest.raises(ConfigError, match="no client could call"):
        load_keys([], "")
