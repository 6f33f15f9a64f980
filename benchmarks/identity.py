"""Cost of identifying prompts by the parts that engines read, beside a checkout that hashed them as they were sent.

`python -m benchmarks.identity --before CHECKOUT [--rounds N] [--out FOLDER]`; CHECKOUT is a working tree of the commit
before prompts had an identity (c2eba98b). Each side is a process of its own with this interpreter; batches alternate,
and of each side the least time of all counts: whatever else a machine does makes a batch longer, never shorter. Writes
identity.md.

Prompts of 64 KB, by API and shape. Timed: from the parsed body to the prompt's text blocks and message keys, of an
unknown prompt (first), of one whose session's last turn, two messages shorter, was hashed before (next); and the same
from the body's bytes (read)."""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter_ns
from typing import Any

Body = dict[str, Any]
SIZE = 64 * 1024
BATCH = 12
LIMIT = 1.15
TIMED = ("first", "next", "read")
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_MARK = {"type": "ephemeral"}
_CODE = ('if name == "main":\n', "\tprint('a')\n", 'say("{}", end="")\n', "path = C:\\\\new\n", "return {1: [2]}\n")
TEXT = """# The identity of prompts

`python -m benchmarks.identity --rounds {rounds}` beside {commit}, which hashed prompts as they were sent: microseconds
from the parsed body of 64 KB to its block hashes and message keys (from the bytes: `read`), the least of {tries} of
each side, the sides in turn. Ratio: now to then; at most {limit} is wanted, **what is more is bold**. `first`: a prompt
that nothing is known of; `next`: the session's turn before, two messages shorter, is known, and Claude Code's had
another billing header.

Where it is more, it is text parts and marks, and the steps below say why it stays so. The budget at 64 KB is 5 us. That
nothing in a part is marked has to be looked for in all of its bytes, but only from its first underscore on, since every
mark has one: prose and code without names are passed at the speed of one byte. A text part's text has to be copied
out of it and hashed once more, as what it is and as what was sent, by which the next turn finds it; what is done for
each message is less than a microsecond, and with forty messages more than the budget. Of Claude Code's first prompt
the system prompt and tools are looked through too, once. Of a session's next turn only new messages are looked at; of
Claude Code's nothing was found then, since its header is another one each time.

| step, of 64 KB | us |
|---|---|
{steps}

| prompt | first, us then / now | ratio | next, us then / now | ratio | read, us then / now | ratio |
|---|---|---|---|---|---|---|
{rows}
"""


def _prose(rng: random.Random, size: int) -> str:
    text = ""
    while len(text) < size:
        text += "".join(rng.choices(_LETTERS, k=rng.randint(2, 9))) + rng.choice((" ", " ", " ", ", ", ".\n"))
    return text[:size]


def _code(rng: random.Random, size: int) -> str:
    text = ""
    while len(text) < size:
        text += rng.choice(_CODE) + _prose(rng, 12)
    return text[:size]


def _snake_case(rng: random.Random, size: int) -> str:
    """Code with what else marks are made of."""
    return _code(rng, size).replace(" ", "_")[:size]


def _foreign(rng: random.Random, size: int) -> str:
    """Of two and three bytes a letter."""
    return "".join(rng.choices("äöüßéèñçабвгдежзийклмн漢字仮名交文 ", k=size * 2 // 5))


Write = Callable[[random.Random, int], str]


def _messages(contents: list[Any]) -> list[Body]:
    return [{"role": ("user", "assistant")[n % 2], "content": one} for n, one in enumerate(contents)]


def _strings(count: int, write: Write) -> Body:
    rng = random.Random(count)
    system = {"role": "system", "content": _prose(rng, 100)}
    return {"model": "m", "messages": [system, *_messages([write(rng, SIZE // count) for _ in range(count)])]}


def _parts(messages: int, parts: int, write: Write) -> Body:
    rng = random.Random(messages + parts)
    size = SIZE // messages // parts
    contents = [[{"type": "text", "text": write(rng, size)} for _ in range(parts)] for _ in range(messages)]
    return {"model": "m", "messages": _messages(contents)}


def _claude_code(messages: int, write: Write) -> Body:
    """Header, marks, tools, calls and their results."""
    rng = random.Random(messages)
    tools = [
        {"name": f"tool_{n}", "description": _prose(rng, 600), "input_schema": {"type": "object", "properties": {}}}
        for n in range(16)
    ]
    header = f"x-anthropic-billing-header: cc_version=2.1.90; cc_entrypoint=cli; cch={rng.getrandbits(20):05x};"
    system = [
        {"type": "text", "text": header},
        {"type": "text", "text": "You are Claude Code.", "cache_control": _MARK},
        {"type": "text", "text": _prose(rng, 12_000), "cache_control": _MARK},
    ]
    contents: list[Any] = []
    for n in range(messages):
        text = write(rng, 40_000 // messages)
        if n % 2:
            call = {"type": "tool_use", "id": f"toolu_{n}", "name": "tool_1", "input": {"path": text[:40]}}
            contents.append([{"type": "text", "text": text}, call])
        elif n:
            contents.append([{"type": "tool_result", "tool_use_id": f"toolu_{n - 1}", "content": text}])
        else:
            contents.append([{"type": "text", "text": text}])
    for content in contents[-3::2]:
        content[-1]["cache_control"] = _MARK
    return {"model": "m", "max_tokens": 9, "system": system, "tools": tools, "messages": _messages(contents)}


def _plain_messages(messages: int, write: Write) -> Body:
    rng = random.Random(messages)
    contents = [write(rng, 48_000 // messages) for _ in range(messages)]
    return {"model": "m", "max_tokens": 9, "system": _prose(rng, 16_000), "messages": _messages(contents)}


def _responses(items: int, write: Write) -> Body:
    rng = random.Random(items)
    kinds = ("input_text", "output_text")
    contents = [[{"type": kinds[n % 2], "text": write(rng, 48_000 // items)}] for n in range(items)]
    turns = [{"type": "message", **message} for message in _messages(contents)]
    return {"model": "m", "instructions": _prose(rng, 16_000), "input": turns if items > 1 else contents[0][0]["text"]}


CHAT, MESSAGES, RESPONSES = "chat", "messages", "responses"
WRITERS: dict[str, Write] = {"prose": _prose, "code": _code, "code_of_names": _snake_case, "no ASCII": _foreign}
#: The API, how it is spelled, and its body.
CASES: dict[str, tuple[str, bool, Callable[[], Body]]] = {
    **{f"chat, {n} messages of text": (CHAT, True, partial(_strings, n, _prose)) for n in (1, 8, 40)},
    "chat, 8 messages of text, code": (CHAT, True, partial(_strings, 8, _code)),
    "chat, 8 messages of text, spaced": (CHAT, False, partial(_strings, 8, _prose)),
    **{
        f"chat, {messages} x {parts} text parts, {name}": (CHAT, True, partial(_parts, messages, parts, write))
        for messages, parts in ((1, 1), (1, 8), (1, 40), (8, 1), (8, 5), (40, 1))
        for name, write in WRITERS.items()
    },
    "chat, 8 x 5 text parts, code, spaced": (CHAT, False, partial(_parts, 8, 5, _code)),
    **{
        f"Claude Code, {n} messages, {name}": (MESSAGES, True, partial(_claude_code, n, write))
        for n in (3, 9, 41)
        for name, write in WRITERS.items()
        if name != "no ASCII" or n == 9
    },
    "Messages, text": (MESSAGES, True, partial(_plain_messages, 9, _prose)),
    **{f"Responses, {n} items": (RESPONSES, True, partial(_responses, n, _code)) for n in (1, 9, 41)},
}


#: What comes first, so that code and seeds are warm.
OTHER: Body = {"model": "m", "input": "x", "messages": [{"role": "user", "content": "x"}]}


class Case:
    """One prompt and the turn before it, and how this checkout hashes them."""

    def __init__(self, name: str) -> None:
        from kvproxy.base.types import RequestKind
        from kvproxy.cache.overlap.index_state import IndexState
        from kvproxy.cache.overlap.local_indexes import LocalIndexes
        from kvproxy.proxy.request.parse import parse_body

        api, compact, make = CASES[name]
        body, separators = make(), (",", ":") if compact else None
        self._body = _encode(body, separators)
        listed = "input" if api == RESPONSES else "messages"
        several = isinstance(body[listed], list) and len(body[listed]) > 2
        earlier = _encode(_without_last_turn(body, listed), separators) if several else b""
        self._kind, self._parse = RequestKind(api), parse_body
        self._other = parse_body(self._kind, _encode(OTHER, separators))
        self._request = parse_body(self._kind, self._body)
        self._earlier = parse_body(self._kind, earlier) if earlier else None
        self._indexes, self._state = LocalIndexes, IndexState

    def times_us(self) -> list[float]:
        """Return the least times of a batch: first, next, read."""
        least = [math.inf] * len(TIMED)
        for _ in range(BATCH):
            for place, us in enumerate((self._first(), self._next(), self._read())):
                least[place] = min(us, least[place])
        return least

    def _first(self) -> float:
        return self._time(self._other, lambda: self._request)

    def _next(self) -> float:
        return math.nan if self._earlier is None else self._time(self._earlier, lambda: self._request)

    def _read(self) -> float:
        return self._time(self._other, lambda: self._parse(self._kind, self._body))

    def _time(self, before: Any, read: Callable[[], Any]) -> float:
        hash_prompt = _hasher(self._indexes(self._state()))
        hash_prompt(before)
        began = perf_counter_ns()
        hash_prompt(read())
        return (perf_counter_ns() - began) / 1000


def _without_last_turn(body: Body, listed: str) -> Body:
    """Return the session's previous turn: Claude Code had another header then, and its mark on the last message."""
    header = body.get("system", [{}])[0]
    if isinstance(header, dict) and header.get("text", "").startswith("x-anthropic"):
        body["system"][0]["text"] = header["text"][:-6] + "00000;"
    del body[listed][-2:]
    return body


def _encode(body: Body, separators: tuple[str, str] | None) -> bytes:
    return json.dumps(body, separators=separators, ensure_ascii=False).encode()


def _hasher(indexes: Any) -> Callable[[Any], object]:
    """As this checkout calls it."""
    if hasattr(indexes, "prompts"):
        return lambda request: indexes.prompts.hash_prompt(request, "m")
    if hasattr(indexes, "hash_prompt"):
        return lambda request: indexes.hash_prompt(request, "m")
    return lambda request: indexes.hashes(request, "m", request.prompt.size_bytes)


def _steps() -> str:
    """Return the times of its parts in this checkout, the least of many."""
    from xxhash import xxh3_64_intdigest

    from kvproxy.base.types import RequestKind
    from kvproxy.cache.prefix.cache_marks import count_marks
    from kvproxy.cache.prefix.hashing import text_chain
    from kvproxy.cache.prefix.prompt_identity import PartRules

    prose, names = (json.dumps(write(random.Random(1), SIZE)).encode() for write in (_prose, _snake_case))
    messages = [
        b'{"role":"user","content":[{"type":"text","text":"%b"}]}' % names[at : at + SIZE // 40].strip(b'\\"')
        for at in range(0, SIZE, SIZE // 40)
    ]
    steps: dict[str, Callable[[], object]] = {
        "hashes of its blocks": lambda: text_chain(prose, 1),
        "one hash of all of it": lambda: xxh3_64_intdigest(prose, 1),
        "a copy": lambda: b"".join((b"", memoryview(prose))),
        "to look for marks: prose": lambda: count_marks((prose,)),
        "to look for marks: code with names": lambda: count_marks((names,)),
        "40 text parts as texts, marks looked for": lambda: PartRules(RequestKind.CHAT).apply(messages),
        "40 hashes of them": lambda: [xxh3_64_intdigest(message, 1) for message in messages],
    }
    return "\n".join(f"| {step} | {_least_us(run):.1f} |" for step, run in steps.items())


def _least_us(run: Callable[[], object]) -> float:
    least = math.inf
    for _ in range(2000):
        began = perf_counter_ns()
        run()
        least = min(least, perf_counter_ns() - began)
    return least / 1000


def serve() -> None:
    """Time a batch for every line that names a case."""
    cases: dict[str, Case] = {}
    gc.disable()
    for line in sys.stdin:
        name = line.strip()
        if name not in cases:
            cases[name] = Case(name)
        print(*cases[name].times_us(), flush=True)


class Side:
    """A process with the code of one checkout."""

    def __init__(self, checkout: Path) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), "--serve"]
        environment = {"PYTHONPATH": str(checkout), "PATH": "/usr/bin:/bin", "PYTHONHASHSEED": "0"}
        self._process = subprocess.Popen(
            command, cwd=checkout, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def times_us(self, case: str) -> list[float]:
        """Of one batch."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{case}\n")
        self._process.stdin.flush()
        return [float(each) for each in self._process.stdout.readline().split()]

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


def _row(case: str, then: list[float], now: list[float]) -> str:
    cells = [case]
    for before, after in zip(then, now, strict=True):
        ratio = after / before
        if math.isinf(ratio) or math.isnan(ratio):
            cells += ["-", "-"]
            continue
        shown = f"{ratio:.2f}" if ratio <= LIMIT else f"**{ratio:.2f}**"
        cells += [f"{before:.1f} / {after:.1f}", shown]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "reports")
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
        return
    if arguments.before is None:
        parser.error("--before is needed")
    there = arguments.before.resolve()
    sides = Side(there), Side(Path(__file__).resolve().parents[1])
    rows = []
    for case in CASES:
        if arguments.only not in case:
            continue
        least = [[math.inf] * len(TIMED) for _ in sides]
        for number in range(arguments.rounds):
            for side in (0, 1) if number % 2 else (1, 0):
                least[side] = list(map(min, least[side], sides[side].times_us(case)))
        rows.append(_row(case, *least))
        print(rows[-1], flush=True)
    for each in sides:
        each.close()
    log = subprocess.run(["git", "-C", there, "log", "-1", "--format=%h"], capture_output=True, text=True, check=True)
    text = TEXT.format(
        rounds=arguments.rounds,
        commit=log.stdout.strip(),
        tries=BATCH * arguments.rounds,
        limit=LIMIT,
        rows="\n".join(rows),
        steps=_steps(),
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "identity.md").write_text(text)


if __name__ == "__main__":
    main()
