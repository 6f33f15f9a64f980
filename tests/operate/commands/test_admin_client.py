"""Errors of a command when the admin listener refuses or fails."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from kvproxy.base.errors import ConfigError
from kvproxy.operate.commands.operate import TOKEN_VARIABLE, AdminAddress, AdminRefused, ask_admin

URL = "http://127.0.0.1:8889"


def answering(answer: httpx.Response) -> httpx.Client:
    return httpx.Client(transport=httpx.MockTransport(lambda request: answer))


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (
            httpx.Response(401, json={}),
            "the admin listener requires another token (--token-file FILE, or KVPROXY_ADMIN_TOKEN)",
        ),
        (httpx.Response(200, json=[]), f"{URL} answers 200 (--url)"),
        (httpx.Response(200, text="<html>"), f"{URL} is not an admin listener of kvproxy (--url)"),
        (httpx.Response(404, json={"error": "not found"}), f"{URL} answers 404 not found (--url)"),
        (httpx.Response(500, json={}), f"{URL} answers 500 (--url)"),
        (
            httpx.Response(422, json={"problems": [{"where": "a", "what": "no", "fix": "yes"}, {"what": "b"}, "c"]}),
            "a: no (yes)\nb",
        ),
    ],
    ids=["token", "no object", "no JSON", "error", "no error", "problems"],
)
def test_refusals_say_what_to_do(answer: httpx.Response, told: str) -> None:
    """All problems the listener named, or how the listener is found."""
    with answering(answer) as client, pytest.raises(AdminRefused) as refused:
        ask_admin(client, URL, "/status")
    assert str(refused.value) == told


@pytest.mark.parametrize("url", ["http://127.0.0.1:port", "ftp://127.0.0.1", "127.0.0.1:8889"])
def test_invalid_urls(url: str) -> None:
    """It is named with an example of one."""
    with AdminAddress(url).connect(env={}) as client, pytest.raises(AdminRefused, match="is no URL like http://127"):
        ask_admin(client, url, "/status")


def test_a_listener_that_does_not_answer() -> None:
    """An error without words is one of time."""

    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("")

    with (
        httpx.Client(transport=httpx.MockTransport(refuse)) as client,
        pytest.raises(AdminRefused, match=r"nothing answers at .* \(no answer in time\): is it the admin listener"),
    ):
        ask_admin(client, URL, "/status")


@pytest.mark.parametrize("text", ["", " \n", "gr\u00fcn", "two\nlines"])
def test_a_file_without_a_token(tmp_path: Path, text: str) -> None:
    """Is a problem of the command line; nothing is asked without it."""
    file = tmp_path / "token"
    file.write_text(text, "utf-8")
    with pytest.raises(ConfigError) as wrong:
        AdminAddress(URL, str(file)).connect(env={})
    (problem,) = wrong.value.problems
    assert (problem.path, problem.message) == ("--token-file", "holds no token")


def test_a_file_goes_over_the_environment(tmp_path: Path) -> None:
    """And without either nothing is sent."""
    file = tmp_path / "token"
    file.write_text("own\n")
    env = {TOKEN_VARIABLE: "theirs"}
    for address, given, sent in (
        (AdminAddress(URL, str(file)), env, "Bearer own"),
        (AdminAddress(URL), env, "Bearer theirs"),
        (AdminAddress(URL), {}, None),
    ):
        with address.connect(env=given) as client:
            assert client.headers.get("authorization") == sent
