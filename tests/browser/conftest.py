"""A real Chromium, driven from the tests; without one these tests are skipped and say so."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--window-size=1360,1000",
)  # fmt: skip


class Browser:
    """Calls of the blocking driver, off the event loop that serves the page."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    async def call(self, work: Callable[[Any], T]) -> T:
        """Run `work(driver)` in a thread."""
        return await asyncio.to_thread(work, self.driver)

    async def script(self, text: str, *arguments: Any) -> Any:
        """Return the result of a script in the page."""
        return await self.call(lambda driver: driver.execute_script(text, *arguments))

    async def open(self, url: str) -> None:
        """Load a page."""
        await self.call(lambda driver: driver.get(url))

    async def emulate(self, *, width: int = 1360, scheme: str = "light") -> None:
        """Emulate a screen of this width, in this colour scheme."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        features = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        await self.call(lambda driver: driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size))
        await self.call(lambda driver: driver.execute_cdp_cmd("Emulation.setEmulatedMedia", features))

    async def until(self, condition: str, *arguments: Any, within_s: float = 10.0) -> None:
        """Return once the script's condition holds; otherwise fail with the page's text."""
        try:
            async with asyncio.timeout(within_s):
                while not await self.script(f"return Boolean({condition})", *arguments):  # noqa: ASYNC110 - a browser
                    await asyncio.sleep(0.02)
        except TimeoutError:
            text = await self.script("return document.body.innerText")
            raise AssertionError(f"not within {within_s} s: {condition}\n{text}") from None

    async def complaints(self) -> list[str]:
        """Errors of scripts, of the content security policy and of loading."""
        entries = await self.call(lambda driver: driver.get_log("browser"))
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]


@pytest.fixture
async def browser(tmp_path: Path) -> AsyncIterator[Browser]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    chromium = next((path for name in _NAMES if (path := shutil.which(name))), None)
    chromedriver = shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        pytest.skip("no chromium with its chromedriver on the PATH")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for option in (*_OPTIONS, f"--user-data-dir={tmp_path / 'profile'}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.chrome.service.Service(chromedriver)
    driver = await asyncio.to_thread(lambda: webdriver.Chrome(options=options, service=service))
    try:
        yield Browser(driver)
    finally:
        await asyncio.to_thread(driver.quit)
