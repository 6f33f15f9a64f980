"""Asking a running proxy's admin listener, for the commands that do."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from kvproxy.errors import ConfigError, KvproxyError, Problem

#: Holds the admin token where no file is named.
TOKEN_VARIABLE = "KVPROXY_ADMIN_TOKEN"
_TIMEOUT_S = 5.0


class AdminRefused(KvproxyError):
    """The admin listener did not do or say it; the text tells what to do."""


@dataclass(frozen=True, slots=True)
class AdminAddress:
    """Where the listener is, and the file with its token."""

    url: str
    token_file: str | None = None

    def client(
        self, *, transport: httpx.BaseTransport | None = None, env: Mapping[str, str] = os.environ
    ) -> httpx.Client:
        """A client that carries the token. Raises ConfigError when there is none where one is named."""
        token = self._token(env)
        headers = {} if token is None else {"authorization": f"Bearer {token}"}
        return httpx.Client(headers=headers, timeout=_TIMEOUT_S, trust_env=False, transport=transport)

    def _token(self, env: Mapping[str, str]) -> str | None:
        if self.token_file is None and not env.get(TOKEN_VARIABLE):
            return None
        where = TOKEN_VARIABLE if self.token_file is None else "--token-file"
        text = (env[TOKEN_VARIABLE] if self.token_file is None else Path(self.token_file).read_text("utf-8")).strip()
        if not text or not text.isascii() or not text.isprintable():
            raise ConfigError([Problem(where, "holds no token", "one line of printable ASCII")])
        return text


def ask(client: httpx.Client, url: str, path: str, *, method: str = "GET") -> dict[str, Any]:
    """The JSON object of one answer. Raises AdminRefused with what the operator should do."""
    try:
        answer = client.request(method, f"{url.rstrip('/')}{path}", json={} if method == "POST" else None)
        data = answer.json()
    except (httpx.InvalidURL, httpx.UnsupportedProtocol):
        raise AdminRefused(f"{url} is no URL like http://127.0.0.1:8889 (--url)") from None
    except httpx.HTTPError as error:
        why = str(error) or type(error).__name__
        raise AdminRefused(f"nothing answers at {url} ({why}): is it the admin listener?") from None
    except ValueError:
        raise AdminRefused(f"{url} is not an admin listener of kvproxy (--url)") from None
    if answer.status_code == 401:
        raise AdminRefused("the admin listener wants a token, and this is not the one (--token-file FILE)")
    if not isinstance(data, dict):
        raise AdminRefused(f"{url} answers {answer.status_code} (--url)")
    if answer.status_code != 200:
        raise AdminRefused(_refusal(url, answer.status_code, data))
    return data


def _refusal(url: str, status: int, data: dict[str, Any]) -> str:
    """Every problem the listener named, each on a line of its own."""
    problems = [one for one in data.get("problems") or () if isinstance(one, dict)]
    if not problems:
        return f"{url} answers {status} {data.get('error', '')}".rstrip() + " (--url)"
    return "\n".join(
        ": ".join(part for part in (one.get("where"), one.get("what")) if part)
        + (f" ({one['fix']})" if one.get("fix") else "")
        for one in problems
    )
