"""`/advise`: a run of the adviser is begun and shown; it is never two at a time and never the proxy's own work."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvproxy.operate.commands.live_advice import AdviceRunner, advise_command
from tests.operate.admin.support import admin_of, audited, problems_of, proxy_of
from tests.support.until import until


def program(text: str) -> Sequence[str]:
    """Return a Python program as a command."""
    return [sys.executable, "-c", text]


async def test_without_a_file_nothing_can_be_asked() -> None:
    """The page hides its panel, and the start is refused."""
    async with admin_of(proxy_of()) as client:
        assert (await client.get("/advise")).json()["state"] == "unavailable"
        answer = await client.post("/advise")
    assert answer.status_code == 409
    assert problems_of(answer) == {"": ("the proxy was not started from a file", "start it with -c FILE")}


@pytest.mark.parametrize(
    "body", [{"budget_s": -1}, {"budget_s": "60"}, {"budget_s": 1e9}, {"budget_s": True}, {"bugdet": 1}]
)
async def test_a_wrong_start_is_refused(body: dict[str, object]) -> None:
    """Whatever is wrong is named."""
    proxy = proxy_of()
    async with AdviceRunner(lambda budget_s: program("")) as proxy.adviser, admin_of(proxy) as client:
        answer = await client.post("/advise", json=body)
        assert answer.status_code == 422
        assert set(problems_of(answer)) <= {"budget_s", "bugdet"}
        assert (await client.get("/advise")).json()["state"] == "none"


async def test_advice_is_shown_when_it_is_done() -> None:
    """With what was asked for passed on, and the start written down."""
    proxy = proxy_of()
    budgets: list[float] = []

    def command(budget_s: float) -> Sequence[str]:
        budgets.append(budget_s)
        return program("print('{\"pools\": []}')")

    runner = AdviceRunner(command)
    proxy.adviser = runner
    with audited() as lines:
        async with runner, admin_of(proxy) as client:
            answer = await client.post("/advise", json={"budget_s": 7})
            assert (answer.status_code, answer.json()["state"]) == (202, "running")
            await until(lambda: runner.describe_run()["state"] == "done")
            assert (await client.get("/advise")).json()["advice"] == {"pools": []}
    assert budgets == [7]
    assert [(line["action"], line["budget_s"]) for line in lines] == [("advise", 7)]


async def test_one_run_at_a_time_and_none_outlives_the_proxy(tmp_path: Path) -> None:
    """The second start is refused; leaving ends the process of the first."""
    proxy, file = proxy_of(), tmp_path / "pid"
    waits = f"import os, signal; open({str(file)!r}, 'w').write(f'{{os.getpid()}} '); signal.pause()"
    async with AdviceRunner(lambda budget_s: program(waits)) as runner, admin_of(proxy) as client:
        proxy.adviser = runner
        assert (await client.post("/advise")).status_code == 202
        assert (await client.post("/advise")).status_code == 409
        await until(lambda: file.exists() and file.read_text().endswith(" "))
    with pytest.raises(ProcessLookupError):
        os.kill(int(file.read_text()), 0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import sys; sys.exit('no such file')", "no such file"),
        ("import sys; sys.exit(3)", "the command failed"),
        ("print('no json')", "Expecting value"),
        ("print('x' * (5 << 20))", "its output was too long"),
        ("import os, signal; os.write(1, b'x' * (5 << 20)); os.close(1); signal.pause()", "its output was too long"),
        ("import os, signal; os.write(2, b'x' * (5 << 20)); os.close(2); signal.pause()", "its output was too long"),
        ("print('[' * 100_000)", "RecursionError"),
    ],
)
async def test_a_run_that_fails_says_why(text: str, said: str) -> None:
    """And the next one can be begun."""
    async with AdviceRunner(lambda budget_s: program(text)) as runner:
        assert runner.start_run(1)
        await until(lambda: runner.describe_run()["state"] == "failed")
        assert said in runner.describe_run()["error"]
        assert runner.start_run(1)


async def test_a_command_that_is_not_there_is_a_failed_run() -> None:
    """Not an error of the proxy's."""
    async with AdviceRunner(lambda budget_s: ["/nonexistent/python"]) as runner:
        runner.start_run(1)
        await until(lambda: runner.describe_run()["state"] == "failed")


def test_the_command_is_the_one_of_the_documentation() -> None:
    """It is what an operator would type."""
    command = advise_command("config.yaml", 60.0)
    assert command[1:] == [
        "-m",
        "kvproxy",
        "doctor",
        "--advise",
        "--json",
        "-c",
        "config.yaml",
        "--advise-budget",
        "60s",
    ]
    assert advise_command("config.yaml", 60.0, lenient=True) == [*command, "--lenient"]
