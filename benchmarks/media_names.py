"""Cost of the search for a client's own names of media in an untrusted request without any.

`python -m benchmarks.media_names [--before CHECKOUT] [--rounds N] [--out FOLDER]`. Each side is a process of its own
with this interpreter; batches alternate, and of each side the least time of all counts. Timed is `BodySanitizer.passes`
of a parsed chat, less `read_names`, which the guard needs in any case. Writes media_names.md."""

from __future__ import annotations

import argparse
import base64
import json
import math
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns
from typing import Any

BATCH = 20
SIZES = {"2 KB": 2 * 1024, "64 KB": 64 * 1024, "1 MB": 1024 * 1024}
_MESSAGES = 8
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
TEXT = """# The search for names of media

`python -m benchmarks.media_names{before} --rounds {rounds}`: microseconds for which an untrusted chat of
{messages} messages, without such names, is searched for them; the least of {tries} of each side, the sides in turn.

| body | {sides} |
|---|{rules}
{rows}

A message that is one flat object has no content part, and whether it is one is found at the speed of one byte (text, of
bodies beyond 8 KB). Messages with content parts are searched by an expression over a span from one quote on, and what
has no quote behind it, as most texts and all pictures, is passed at the speed of one byte; where there are many quotes,
as in code, the spans grow until one search is all. Content parts pass the budget of 5 us at 64 KB: nothing that is
known of them beforehand excludes a name.
"""


def _prose(rng: random.Random, size: int) -> str:
    text = ""
    while len(text) < size:
        text += "".join(rng.choices(_LETTERS, k=rng.randint(2, 9))) + rng.choice((" ", " ", " ", ", ", ".\n"))
    return text[:size]


def _code(rng: random.Random, size: int) -> str:
    line = 'say("{}", end="")  # '
    return "".join(line + _prose(rng, 40) + "\n" for _ in range(size // 64))


def _text(rng: random.Random, size: int) -> Any:
    return _prose(rng, size)


def _text_parts(rng: random.Random, size: int) -> Any:
    return [{"type": "text", "text": _prose(rng, size)}]


def _code_parts(rng: random.Random, size: int) -> Any:
    return [{"type": "text", "text": _code(rng, size)}]


def _picture(rng: random.Random, size: int) -> Any:
    url = "data:image/png;base64," + base64.b64encode(rng.randbytes(size * 3 // 4)).decode()
    return [{"type": "text", "text": "Look:"}, {"type": "image_url", "image_url": {"url": url}}]


WRITERS: dict[str, Callable[[random.Random, int], Any]] = {
    "text": _text,
    "text parts": _text_parts,
    "text parts, code": _code_parts,
    "pictures": _picture,
}
CASES = [(name, size) for name in WRITERS for size in SIZES]


def _body(name: str, size: str) -> bytes:
    rng = random.Random(size)
    contents = [WRITERS[name](rng, SIZES[size] // _MESSAGES) for _ in range(_MESSAGES)]
    messages = [{"role": ("user", "assistant")[n % 2], "content": one} for n, one in enumerate(contents)]
    return json.dumps({"model": "m", "max_tokens": 9, "messages": messages}, separators=(",", ":")).encode()


def _search_us(name: str, size: str) -> float:
    from kvproxy.base.types import RequestKind
    from kvproxy.proxy.forward.body_guard import BodySanitizer, read_names
    from kvproxy.proxy.request.exchange import Exchange
    from kvproxy.proxy.request.parse import parse_body

    guard = BodySanitizer()
    body = _body(name, size)
    exchange = Exchange(received_at=0.0, body=body, inference=parse_body(RequestKind.CHAT, body))
    assert guard.passes(body, exchange)

    def least(run: Callable[[], object]) -> float:
        fastest = math.inf
        for _ in range(BATCH):
            exchange.names = None
            began = perf_counter_ns()
            run()
            fastest = min(fastest, perf_counter_ns() - began)
        return fastest / 1000

    return least(lambda: guard.passes(body, exchange)) - least(lambda: read_names(body, exchange))


def serve() -> None:
    """Time a batch for every line that names a case."""
    for line in sys.stdin:
        name, _, size = line.strip().partition(";")
        print(_search_us(name, size), flush=True)


class Side:
    """A process with the code of one checkout."""

    def __init__(self, checkout: Path) -> None:
        self.name = _commit(checkout)
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--serve"],
            cwd=checkout,
            env={"PYTHONPATH": str(checkout), "PATH": "/usr/bin:/bin"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def search_us(self, name: str, size: str) -> float:
        """Of one batch."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{name};{size}\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


def _commit(checkout: Path) -> str:
    done = subprocess.run(["git", "-C", checkout, "log", "-1", "--format=%h"], capture_output=True, text=True)
    return done.stdout.strip() or checkout.name


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--before", type=Path, help="a checkout to measure beside this one")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "reports")
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
        return
    here = Path(__file__).resolve().parents[1]
    checkouts = [arguments.before.resolve(), here] if arguments.before else [here]
    sides = [Side(checkout) for checkout in checkouts]
    rows = []
    for name, size in CASES:
        least = [math.inf] * len(sides)
        for _ in range(arguments.rounds):
            least = [min(known, side.search_us(name, size)) for known, side in zip(least, sides, strict=True)]
        rows.append(f"| {name}, {size} | {' | '.join(f'{us:.1f}' for us in least)} |")
        print(rows[-1], flush=True)
    for side in sides:
        side.close()
    text = TEXT.format(
        before=f" --before {sides[0].name}" if arguments.before else "",
        rounds=arguments.rounds,
        messages=_MESSAGES,
        tries=BATCH * arguments.rounds,
        sides=" | ".join([f"{side.name}, us" for side in sides[:-1]] + ["now, us"]),
        rules="---|" * len(sides),
        rows="\n".join(rows),
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "media_names.md").write_text(text)


if __name__ == "__main__":
    main()
