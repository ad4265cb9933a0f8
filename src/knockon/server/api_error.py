"""Errors as OpenAI's API shapes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: HTTP status.
        message: for the client's reader.
        kind: ``error.type``; by default what the status is usually called.
        param: the field of the request that is to blame.
        code: ``error.code``, for programs.
        headers: of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind or _KINDS.get(status, "invalid_request_error")
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """``{"error": {message, type, param, code}}``."""
        error = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}

    def response(self) -> Response:
        """The whole answer. ASCII, so that no quoted input can break it."""
        content = json.dumps(self.body()).encode("ascii")
        return Response(content, self.status, self.headers, "application/json")


_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400, for what the client can mend."""
    return ApiError(400, message, param=param, code=code)
