"""The HTTP call that has another program start engines."""

from __future__ import annotations

import httpx

from kvproxy.base.errors import Refused
from kvproxy.cache.clients.api import Api
from kvproxy.features.engine_sleep.settings import WakeCallSettings

_CALL_S = 10.0


class HttpWakeCall:
    """Makes the call; its headers are in no log."""

    def __init__(self, settings: WakeCallSettings) -> None:
        self._settings = settings

    async def __call__(self) -> None:
        """Raise ClientError unless the answer is a 2xx."""
        settings = self._settings
        async with httpx.AsyncClient(trust_env=False) as http:
            api = Api(http, settings.url, service="the wake call")
            for name, value in settings.headers.items():
                api = api.with_header(name, value.get_secret_value())
            try:
                await api.call(settings.method, "", timeout_s=_CALL_S)
            except Refused as error:  # its text may repeat a header
                raise Refused(f"the wake call was answered with {error.status}", status=error.status) from None
