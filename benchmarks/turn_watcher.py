"""`kvproxy ARGUMENTS...` whose main thread is counted between SIGUSR1 and SIGUSR2: `turn_watcher.py FILE ARGUMENTS...`.

Run by the Python of the checkout under measurement, so it imports nothing of this one. FILE gets the counts as JSON.
"""

from __future__ import annotations

import dis
import inspect
import json
import os
import signal
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

_RESUME = dis.opmap["RESUME"]
_COROUTINE = inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR


class Watcher:
    """The Python calls of the thread it is started in, in their order, each with its depth and its C calls."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._calls: list[list[Any]] = []
        self._open: list[list[Any]] = []

    def start(self, *_: object) -> None:
        """Start counting."""
        self._calls = []
        self._open = []
        sys.setprofile(self._event)

    def stop(self, *_: object) -> None:
        """Write `{"calls": [[depth, module, class, function, resumed, C calls]], "lines": {module: lines}}`."""
        sys.setprofile(None)
        calls = [
            [depth, *_name(code, module, maker), resumed, c] for depth, code, module, maker, resumed, c in self._calls
        ]
        modules = {call[1] for call in calls if call[1].partition(".")[0] == "kvproxy"}
        lines = {name: len(Path(sys.modules[name].__file__ or "").read_text().splitlines()) for name in modules}
        whole = self._file.with_suffix(".part")
        whole.write_text(json.dumps({"calls": calls, "lines": lines}))
        os.replace(whole, self._file)

    def _event(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            code = frame.f_code
            maker = ""
            if code.co_filename.startswith("<") and code.co_argcount:  # written by dataclasses, namedtuple
                maker = type(frame.f_locals.get(code.co_varnames[0])).__qualname__
            call = [len(self._open), code, frame.f_globals.get("__name__", ""), maker, is_resumed(frame), 0]
            self._calls.append(call)
            self._open.append(call)
        elif event == "return":
            if self._open:
                self._open.pop()
        elif event == "c_call" and self._open:
            self._open[-1][-1] += 1


def is_resumed(frame: FrameType) -> bool:
    """Return True for a coroutine or generator that goes on, not one that starts."""
    code = frame.f_code
    if not code.co_flags & _COROUTINE or frame.f_lasti < 0:
        return False
    operation, argument = code.co_code[frame.f_lasti], code.co_code[frame.f_lasti + 1]
    return operation == _RESUME and argument & 3 != 0


def _name(code: CodeType, module: str, maker: str) -> tuple[str, str, str]:
    """Return module, class ("" for a plain function) and qualified name."""
    if maker:
        return module, maker, f"{maker}.{code.co_name}"
    qualified = code.co_qualname
    owner = qualified.partition(".<locals>")[0].rpartition(".")[0]
    return module, owner, qualified


if __name__ == "__main__":
    watcher = Watcher(Path(sys.argv[1]))
    signal.signal(signal.SIGUSR1, watcher.start)
    signal.signal(signal.SIGUSR2, watcher.stop)
    del sys.path[0]  # the folder of this script
    from kvproxy.cli import main

    sys.exit(main(sys.argv[2:]))
