"""The HTTP application: routes, gates, and every error in OpenAI's shape."""

from __future__ import annotations

import reprlib
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from knockon import __version__
from knockon.server import admin_routes, openai_routes
from knockon.server.api_error import ApiError, bad_request
from knockon.server.gates import BodyGate, KeyGate
from knockon.server.state import ServerState


def build_app(state: ServerState) -> FastAPI:
    """The application of one server."""
    # The interactive pages of FastAPI load from elsewhere; /openapi.json stays.
    app = FastAPI(title="Knockon", version=__version__, docs_url=None, redoc_url=None)
    app.state.server = state
    app.include_router(openai_routes.router)
    app.include_router(admin_routes.router)
    app.add_middleware(BodyGate, limit=state.settings.max_body_bytes, refused=state.metrics.refused)
    if state.settings.api_key is not None:
        app.add_middleware(KeyGate, key=state.settings.api_key, refused=state.metrics.refused)

    def answer(error: ApiError) -> Response:
        state.metrics.refused(error.status)
        return error.response()

    @app.exception_handler(ApiError)
    async def on_api_error(request: Request, error: ApiError) -> Response:
        return answer(error)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(request: Request, error: RequestValidationError) -> Response:
        return answer(_from_validation(error.errors()))

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> Response:
        text = str(error.detail)
        if error.status_code == 404:
            text = f"no such path: {request.method} {request.url.path!r}"
        return answer(ApiError(error.status_code, text, headers=error.headers))

    @app.exception_handler(Exception)
    async def on_bug(request: Request, error: Exception) -> Response:
        return answer(ApiError(500, f"internal error: {type(error).__name__}"))

    return app


_quote = reprlib.Repr()
_quote.maxstring = _quote.maxother = 60


def _from_validation(errors: Any) -> ApiError:
    """The first fault found, and where."""
    first = errors[0]
    place = ".".join(str(part) for part in first["loc"] if part != "body")
    if first["type"] == "json_invalid":
        return bad_request(f"the body is not JSON: {first.get('ctx', {}).get('error', '')}")
    if not place:
        return bad_request("the body must be a JSON object, sent as application/json")
    text = f"{place}: {first['msg']}"
    if first["type"] != "missing":  # whose input is the object that lacks it
        found = _quote.repr(first["input"])
        wanted = first["msg"].removeprefix("Input should be ")
        if first["type"] == "too_short":
            wanted = f"at least {first['ctx']['min_length']}"
        text = f"{place}: found {found}, wanted {wanted}"
        if wanted == first["msg"]:
            text = f"{place}: {wanted}; found {found}"
    return bad_request(text, place, first["type"])
