"""API keys: where they come from, and whose a presented one is."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter

from kvproxy.config.filter_schema import ApiKey
from kvproxy.config.model import Name
from kvproxy.errors import ConfigError, Problem

_name = TypeAdapter(Name)


class Owner(NamedTuple):
    """Whose a key is, and what it may do besides."""

    name: str
    debug: bool = False
    trusted: bool = False


class KeyRing:
    """Finds the owner of a key in the same time for every key, known or not, however many there are.

    Keys are kept as digests under a secret of this process: nobody outside can choose or predict a digest, so how long
    a lookup takes says nothing about any key.
    """

    def __init__(self, owners: Iterable[tuple[Owner, str]]) -> None:
        self._secret = secrets.token_bytes(32)
        digests = ((self._digest(key.encode()), owner) for owner, key in owners)
        self._by_digest = {digest: (digest, owner) for digest, owner in digests}
        self._nobody = (secrets.token_bytes(32), Owner(""))

    def owner(self, key: bytes) -> Owner | None:
        """The owner that goes with `key`; None when there is none."""
        digest = self._digest(key)
        known, owner = self._by_digest.get(digest, self._nobody)
        return owner if hmac.compare_digest(known, digest) else None

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, key=self._secret, digest_size=32).digest()


def load_keys(given: Sequence[ApiKey], file: str) -> list[tuple[Owner, str]]:
    """Owner and key of every configured key; those from the file have no rights besides calling. Raises ConfigError
    with all problems; a key is never in the text."""
    problems: list[Problem] = []
    found = [
        (f"keys[{index}]", "", Owner(entry.name, entry.debug, entry.trusted), entry.key.get_secret_value())
        for index, entry in enumerate(given)
    ]
    if file:
        found += [(path, place, Owner(name), key) for path, place, name, key in _from_file(file, problems)]
    owners: dict[str, Owner] = {}
    for path, place, owner, key in found:
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            problems.append(Problem(path, f"{place}the key is empty or not visible ASCII"))
        elif owners.setdefault(key, owner).name != owner.name:
            problems.append(Problem(path, f"{place}{owner.name!r} has the same key as {owners[key].name!r}"))
    if not found and not problems:
        problems.append(Problem("keys", "no key: nobody could call", "give `keys` or `file`"))
    if problems:
        raise ConfigError(problems)
    return [(owner, key) for key, owner in owners.items()]


def _from_file(file: str, problems: list[Problem]) -> list[tuple[str, str, str, str]]:
    """(path, place, name, key) of each `name: key` line; blank lines and `#` comments are skipped."""
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        problems.append(Problem("file", f"cannot read {file}: {why}"))
        return []
    found = []
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        place = f"{file}, line {number}: "
        name, separator, key = text.partition(": ")
        try:
            if not separator:
                raise ValueError
            found.append(("file", place, _name.validate_python(name), key.strip()))
        except ValueError:
            problems.append(Problem("file", f"{place}expected `name: key` with a plain name"))
    return found
