"""What a request passes before its route: the key, and the size of its body. Plain ASGI."""

from __future__ import annotations

import hmac
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from knockon.server.api_error import ApiError

OPEN_PATHS = frozenset({"/", "/health", "/health/ready", "/metrics"})
# A body that is too large is read on and dropped so far, so that the client hears the answer.
_DROPPED = 64 << 20


class KeyGate:
    """Asks for ``Authorization: Bearer KEY`` on all but :data:`OPEN_PATHS`.

    Args:
        refused: told the status of what does not pass.
    """

    def __init__(self, app: ASGIApp, key: str, refused: Callable[[int], None]) -> None:
        self._app = app
        self._refused = refused
        self._wanted = f"Bearer {key}".encode("ascii")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass, or answer 401."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            found = Headers(scope=scope).get("authorization", "").encode("latin-1")
            if not hmac.compare_digest(found, self._wanted):
                error = ApiError(
                    401,
                    "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
                self._refused(error.status)
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


class BodyGate:
    """Reads bodies of at most ``limit`` bytes before the route sees them; larger ones get 413.

    Args:
        refused: told the status of what does not pass.
    """

    def __init__(self, app: ASGIApp, limit: int, refused: Callable[[int], None]) -> None:
        self._app = app
        self._refused = refused
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass, or answer 413."""
        if scope["type"] != "http" or scope["method"] not in ("POST", "PUT", "PATCH"):
            await self._app(scope, receive, send)
            return
        parts: list[bytes] = []
        size = 0
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            part = message.get("body", b"")
            size += len(part)
            more = message.get("more_body", False)
            if size <= self._limit:
                parts.append(part)
            elif size > _DROPPED:
                break
        if size > self._limit:
            error = ApiError(
                413,
                f"the body has more than {self._limit} bytes (--max-body-bytes)",
                code="request_too_large",
            )
            self._refused(error.status)
            await error.response()(scope, receive, send)
            return
        body: Message | None = {"type": "http.request", "body": b"".join(parts), "more_body": False}

        async def replay() -> Message:
            nonlocal body
            if body is not None:
                message, body = body, None
                return message
            return await receive()

        await self._app(scope, replay, send)
