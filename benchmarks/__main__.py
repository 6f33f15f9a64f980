"""`python -m benchmarks [NAME ...]`: the measurements one after another, each writing its report; all by default.

Give one name alone to pass it options of its own: `python -m benchmarks data_plane --rounds 1`.
"""

from __future__ import annotations

import subprocess
import sys

#: In the order they run, with options that keep the whole under an hour.
BENCHMARKS: dict[str, tuple[str, ...]] = {
    "data_plane": (),
    "kvcache_filter": ("--out", "benchmarks/reports"),
    "scrape": (),
    "prefix_index": (),
    "decision": (),
    "routing": ("--quick",),
}


def main(arguments: list[str]) -> int:
    """Run the benchmarks and return the first exit status that is not 0."""
    names = [argument for argument in arguments if argument in BENCHMARKS]
    options = arguments[1:] if len(names) == 1 else []
    unknown = [argument for argument in arguments if argument not in BENCHMARKS and argument not in options]
    if unknown:
        print(f"unknown: {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    for name in names or BENCHMARKS:
        print(f"== {name}", flush=True)
        done = subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *(options or BENCHMARKS[name])], check=False)
        if done.returncode:
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
