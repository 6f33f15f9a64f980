"""Operating a running proxy through its admin listener: the client, and `kvproxy drain`, `undrain` and `reload`."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import quote

import httpx

from kvproxy.base.errors import ConfigError, KvproxyError, Problem
from kvproxy.operate.config.decode import spelling_hint

#: Environment variable with the admin token, used if no file is named.
TOKEN_VARIABLE = "KVPROXY_ADMIN_TOKEN"
_TIMEOUT_S = 5.0
#: Interval of looks at a drained endpoint.
_LOOK_AGAIN_S = 0.5


class AdminRefused(KvproxyError):
    """The admin listener refused a request or gave no answer; the text names the remedy."""


class NothingAnswers(AdminRefused):
    """There is no admin listener at that address."""


@dataclass(frozen=True, slots=True)
class AdminAddress:
    """Where the listener is, and the file with its token."""

    url: str
    token_file: str | None = None

    def connect(
        self, *, transport: httpx.BaseTransport | None = None, env: Mapping[str, str] = os.environ
    ) -> httpx.Client:
        """Return a client that carries the token. Raises ConfigError when there is none where one is named."""
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


def ask_admin(client: httpx.Client, url: str, path: str, *, method: str = "GET") -> dict[str, Any]:
    """Return the JSON object of one answer. Raises AdminRefused with what the operator should do."""
    try:
        answer = client.request(method, f"{url.rstrip('/')}{path}", json={} if method == "POST" else None)
        data = answer.json()
    except (httpx.InvalidURL, httpx.UnsupportedProtocol):
        raise AdminRefused(f"{url} is no URL like http://127.0.0.1:8889 (--url)") from None
    except httpx.HTTPError as error:
        why = re.sub(r"^\[Errno -?\d+\] ", "", str(error)) or "no answer in time"
        raise NothingAnswers(f"nothing answers at {url} ({why}): is it the admin listener?") from None
    except ValueError:
        raise AdminRefused(f"{url} is not an admin listener of kvproxy (--url)") from None
    if answer.status_code == 401:
        how = f"--token-file FILE, or {TOKEN_VARIABLE}"
        raise AdminRefused(f"the admin listener requires another token ({how})")
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


def main_drain(args: argparse.Namespace) -> int:
    """`kvproxy drain` and `kvproxy undrain`."""
    address = AdminAddress(args.url, args.token_file)
    how = {"cluster": args.cluster, "draining": args.draining}
    if args.draining:
        how |= {"wait": args.wait, "move": getattr(args, "move", False)}
    return drain_endpoint(address, args.endpoint, **how, out=sys.stdout, err=sys.stderr)


def main_reload(args: argparse.Namespace) -> int:
    """`kvproxy reload`."""
    return reload_configuration(AdminAddress(args.url, args.token_file), out=sys.stdout, err=sys.stderr)


def drain_endpoint(
    address: AdminAddress,
    endpoint: str,
    *,
    cluster: str | None = None,
    draining: bool = True,
    wait: bool = False,
    move: bool = False,
    out: TextIO,
    err: TextIO,
    transport: httpx.BaseTransport | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Take an endpoint out of, or back into, rotation, and with `wait` until it has no request; 1 when that was not
    done. With `move` its streams go on elsewhere where they can, those that begin while it waits too."""
    action = "drain" if draining else "undrain"
    with address.connect(transport=transport) as client:
        try:
            place = _cluster_of(ask_admin(client, address.url, "/endpoints"), endpoint, cluster)
            path = f"/endpoints/{quote(place, safe='')}/{quote(endpoint, safe='/:@')}"
            running = ask_admin(client, address.url, f"{path}/{action}", method="POST").get("in_flight", 0)
            said = _describe_drained(running) if draining else "gets requests again"
            print(f"endpoint {endpoint!r} of cluster {place!r} {said}", file=out, flush=True)
            if move and running:
                staying = ask_admin(client, address.url, f"{path}/move", method="POST").get("staying", ())
                sleep(_LOOK_AGAIN_S)
                running = _count_running(ask_admin(client, address.url, "/endpoints"), place, endpoint)
                print(_describe_moved(running, staying), file=out, flush=True)
            while wait and running:
                if move:
                    ask_admin(client, address.url, f"{path}/move", method="POST")
                sleep(_LOOK_AGAIN_S)
                running = _count_running(ask_admin(client, address.url, "/endpoints"), place, endpoint)
        except AdminRefused as error:
            print(f"kvproxy {action}: {error}", file=err)
            return 1
    if wait:
        print("it has none left" if move else "it has finished all of them", file=out)
    return 0


def _describe_drained(running: int) -> str:
    if not running:
        return "gets no new requests and has none running"
    return f"gets no new requests; it finishes {running} running {'request' if running == 1 else 'requests'}"


def _describe_moved(running: int, staying: Sequence[str]) -> str:
    if not running:
        return "its streams went on elsewhere"
    why = f" ({', '.join(staying)})" if staying else ""
    return f"streams went on elsewhere; it has {running} left{why}"


def _count_running(answer: dict[str, Any], cluster: str, endpoint: str) -> int:
    """Return requests of an endpoint, or of all ranks of an engine; 0 for one that is gone."""
    members = answer.get("clusters", {}).get(cluster, ())
    return sum(one.get("in_flight", 0) for one in members if endpoint in (one.get("id"), one.get("engine_id")))


def reload_configuration(
    address: AdminAddress, *, out: TextIO, err: TextIO, transport: httpx.BaseTransport | None = None
) -> int:
    """Have the configuration file read again; 1, and every problem, when it was not applied."""
    with address.connect(transport=transport) as client:
        try:
            answer = ask_admin(client, address.url, "/reload", method="POST")
        except NothingAnswers as error:
            print(f"kvproxy reload: {error}\nnothing was reloaded", file=err)
            return 1
        except AdminRefused as error:
            print(f"kvproxy reload: not reloaded, the old configuration stays\n{error}", file=err)
            return 1
    print("configuration reloaded", file=out)
    if answer.get("after_restart"):
        print(f"after a restart: {', '.join(answer['after_restart'])}", file=out)
    return 0


def _cluster_of(answer: dict[str, Any], endpoint: str, cluster: str | None) -> str:
    """Return the cluster that has the endpoint. Raises AdminRefused when none has, or several have."""
    clusters: dict[str, Sequence[dict[str, Any]]] = answer.get("clusters", {})
    if cluster is not None:
        if cluster not in clusters:
            raise AdminRefused(f"there is no cluster {cluster!r} ({spelling_hint(cluster, clusters)})")
        clusters = {cluster: clusters[cluster]}
    holding = [
        name
        for name, endpoints in clusters.items()
        if any(endpoint in (one.get("id"), one.get("engine_id")) for one in endpoints)
    ]
    if len(holding) > 1:
        raise AdminRefused(f"clusters {', '.join(holding)} have an endpoint {endpoint!r}: name one (--cluster)")
    if not holding:
        known = [str(one.get("id")) for endpoints in clusters.values() for one in endpoints]
        raise AdminRefused(
            f"there is no endpoint {endpoint!r} ({spelling_hint(endpoint, known) or 'none is configured'})"
        )
    return holding[0]
