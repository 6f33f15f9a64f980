"""Sessions through a whole proxy."""

from __future__ import annotations

from typing import Any

from tests.proxy.forward.test_policy_choice import PATH, gateway
from tests.support.proxy import chat


async def test_a_session_and_its_sub_agents_meet() -> None:
    """Under `session`, as Claude Code names them; a cache group alone is no session."""
    async with gateway(policy="session") as (running, _):

        async def where(body: dict[str, Any], **headers: str) -> tuple[str, str]:
            answer = await running.client.post(PATH, json=body, headers={"x-kvproxy-debug": "1", **headers})
            reason = answer.headers["x-kvproxy-decision"].partition("reason=")[2].partition(";")[0]
            return answer.headers["x-kvproxy-endpoint"], reason

        for number in range(8):
            root = {"x-claude-code-session-id": f"root-{number}"}
            home = await where(chat(), **root)
            assert home[1] == "session"
            for agent in "xyz":
                assert await where(chat(), **root, **{"x-claude-code-agent-id": agent}) == home
        assert (await where(chat(prompt_cache_key="k")))[1] == "no_session"
