"""Models that engines list: asked for seldom, bounded, and never waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvproxy.proxy.forward.models import AGAIN_S, MAX_LISTED, MAX_NAME, ServedModels
from tests.support.clock import FakeClock
from tests.support.until import until


class Engines:
    """Their lists of models, and how often they were requested."""

    def __init__(self, *answers: Sequence[str] | Exception) -> None:
        self.answers = list(answers)
        self.asked = 0

    async def ask(self) -> Sequence[str]:
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


async def test_a_model_is_known_once_the_engines_said_so(clock: FakeClock) -> None:
    """The request that names it first does not wait; clients cannot make the engines be asked again and again."""
    engines = Engines(["qwen"])
    async with ServedModels(engines.ask, clock=clock, delay_s=0.0) as served:
        assert not served.serves("qwen")
        await until(lambda: served.serves("qwen"))
        for number in range(100):
            assert not served.serves(f"made-up-{number}")
        assert engines.asked == 1
        clock.advance(AGAIN_S)
        engines.answers = [["lora", "qwen"]]
        assert not served.serves("lora")
        await until(lambda: served.serves("lora"))
        assert engines.asked == 2


async def test_one_unknown_model_more_asks_nobody(clock: FakeClock) -> None:
    """Nor do many, each in its own time, until it is time to ask again: whatever clients make up."""
    engines = Engines(["qwen"])
    async with ServedModels(engines.ask, clock=clock, delay_s=0.0) as served:
        for number in range(20):
            assert not served.serves(f"made-up-{number}")
            await until(lambda: served.serves("qwen"))
            await asyncio.sleep(0.001)
        assert engines.asked == 1
        clock.advance(AGAIN_S - 0.1)
        assert not served.serves("made-up")
        await asyncio.sleep(0.001)
        assert engines.asked == 1


async def test_lists_are_bounded(clock: FakeClock) -> None:
    """Known names stay when a list grows over the bound; a name that is too long is none."""
    engines = Engines(["zz", "x" * (MAX_NAME + 1)], [f"m{number:03}" for number in range(200)] + ["zz"])
    async with ServedModels(engines.ask, clock=clock, delay_s=0.0) as served:
        served.serves("zz")
        await until(lambda: served.serves("zz"))
        clock.advance(AGAIN_S)
        served.serves("new")
        await until(lambda: served.serves("m000"))
        names = ["zz", *(f"m{number:03}" for number in range(200)), "x" * (MAX_NAME + 1)]
        assert sum(served.serves(name) for name in names) == MAX_LISTED
        assert served.serves("zz")


async def test_engines_that_do_not_answer_change_nothing(clock: FakeClock) -> None:
    """Whether they say nothing or the asking breaks."""
    engines = Engines(["m"], [], RuntimeError("broken"))
    async with ServedModels(engines.ask, clock=clock, delay_s=0.0) as served:
        served.serves("m")
        await until(lambda: served.serves("m"))
        for asked in (2, 3):
            clock.advance(AGAIN_S)
            served.serves("other")
            await until(lambda asked=asked: engines.asked == asked)  # type: ignore[misc]
        assert served.serves("m")
    assert not ServedModels(engines.ask, clock=clock).serves("x")  # not entered: nothing is started


async def test_engines_with_adapters_are_asked_again_and_again(clock: FakeClock) -> None:
    """As long as they have some, whatever one of the answers was."""
    engines = Engines(["base", "lora"], RuntimeError("broken"), [], ["base"])
    asks = iter([True, True, True, False])
    async with ServedModels(engines.ask, clock=clock, change=lambda: next(asks), delay_s=0.0, follow_s=0.0) as served:
        served.serves("lora")
        await until(lambda: engines.asked == 4 and next(asks, None) is None)
        assert served.serves("base")
        assert not served.serves("lora")
