"""Count the files outside a feature's folder that changes to it touch: `python -m tests.feature_commits [COMMITS]`.

A change to a feature is a commit that touches the folder of exactly one. Its folder is `kvproxy/features/NAME` with
`tests/features/NAME` and, with real engines, `tests/real/NAME`."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from statistics import median
from typing import NamedTuple

ROOT = Path(__file__).parents[1]

#: Written for every change that a user sees, generated, or measured: no place that an author has to find.
RECORDS = ("CHANGELOG.md", "docs/configuration.md", "docs/metrics.md", "tests/golden/", "benchmarks/reports/")

_FEATURE = re.compile(r"kvproxy/features/(\w+)/")


class FeatureChange(NamedTuple):
    """A commit that changes one feature, and the files that it touches elsewhere."""

    feature: str
    subject: str
    outside: Sequence[str]

    @property
    def code(self) -> int:
        """Number of files of the package."""
        return sum(name.startswith("kvproxy/") for name in self.outside)

    @property
    def written(self) -> int:
        """Number of files without records."""
        return sum(not name.startswith(RECORDS) for name in self.outside)


def find_changes(commits: Iterable[Sequence[str]]) -> Iterator[FeatureChange]:
    """Yield the changes to one feature. A commit is its subject and the files that it touches."""
    for subject, *files in commits:
        names = {match[1] for name in files if (match := _FEATURE.match(name))}
        if len(names) == 1:
            (feature,) = names
            own = tuple(f"{folder}/{feature}/" for folder in ("kvproxy/features", "tests/features", "tests/real"))
            yield FeatureChange(feature, subject, [name for name in files if not name.startswith(own)])


def read_commits() -> Iterator[list[str]]:
    """Yield the commits of this checkout, the latest first."""
    command = ["git", "log", "--no-merges", "--name-only", "--format=%x00%s"]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for commit in text.split("\0")[1:]:
        yield [line for line in commit.splitlines() if line]


def main(arguments: Sequence[str]) -> None:
    """Print the changes and the medians over them."""
    changes = list(islice(find_changes(read_commits()), int(arguments[0]) if arguments else 20))
    for change in changes:
        sys.stdout.write(
            f"{len(change.outside):3} {change.written:3} {change.code:3}  {change.feature}: {change.subject}\n"
        )
    counts = [[len(one.outside), one.written, one.code] for one in changes]
    total, written, code = map(median, zip(*counts, strict=True))
    counted = f"{total:g} files outside, {written:g} without records, {code:g} of the package"
    sys.stdout.write(f"median of {len(changes)} changes: {counted}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
