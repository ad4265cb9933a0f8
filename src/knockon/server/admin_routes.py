"""Health, metrics, what the server is, and its cache."""

from __future__ import annotations

import time
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from knockon import __version__
from knockon.server.api_error import ApiError
from knockon.server.engine_client import EngineState
from knockon.server.state import RETRY_AFTER, ServerState

router = APIRouter()
STATS_PATIENCE = 2.0  # s; a step may be long
FLUSH_PATIENCE = 60.0  # s
# The page holds its own style and script, and speaks to this server alone.
_PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; form-action 'none'; base-uri 'none'"
)
_HIDDEN = frozenset({"api_key", "engine"})


def _state(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health(request: Request) -> Response:
    """200 while the process is worth keeping, loading included."""
    state = _state(request)
    if state.engine.state is EngineState.FAILED:
        return JSONResponse({"status": state.why_not_ready()}, 503)
    return JSONResponse({"status": "ok"})


@router.head("/health/ready", include_in_schema=False)
@router.get("/health/ready")
async def ready(request: Request) -> Response:
    """200 while requests are served; else 503 with the reason."""
    why = _state(request).why_not_ready()
    if why:
        return JSONResponse({"status": why}, 503, {"Retry-After": RETRY_AFTER})
    return JSONResponse({"status": "ready"})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus exposition."""
    state = _state(request)
    stats = await state.engine.stats(STATS_PATIENCE)
    return Response(state.metrics.render(stats), media_type="text/plain; version=0.0.4")


@router.get("/server_info")
async def server_info(request: Request) -> dict[str, Any]:
    """Settings in force, the machine, capacity, and what the engine has done so far."""
    state = _state(request)
    stats = await state.engine.stats(STATS_PATIENCE)
    capacity = state.engine.capacity
    names = [name for name in vars(state.settings) if name not in _HIDDEN]
    return {
        "version": __version__,
        "model": state.settings.model_name,
        "uptime": round(time.time() - state.started, 3),
        "ready": not state.why_not_ready(),
        "server": {name: getattr(state.settings, name) for name in names},
        "engine": state.engine.config,
        "model_sizes": state.engine.sizes,
        "environment": state.engine.environment,
        "capacity": vars(capacity) if capacity is not None else None,
        "occupancy": stats.occupancy if stats is not None else None,
        "metrics": stats.metrics if stats is not None else None,
    }


@router.post("/flush_cache")
async def flush_cache(request: Request) -> dict[str, Any]:
    """Forget earlier prompts, as far as no request uses them."""
    state = _state(request)
    state.serving()
    pages = await state.engine.flush_cache(FLUSH_PATIENCE)
    if pages is None:
        raise ApiError(503, "the engine did not answer in time", code="not_ready")
    return {"flushed_pages": pages, "requests_in_flight": state.engine.in_flight}


@router.head("/", include_in_schema=False)
@router.get("/", include_in_schema=False)
async def page() -> Response:
    """The built-in page."""
    text = files("knockon.server").joinpath("page.html").read_text("utf-8")
    return HTMLResponse(text, headers={"Content-Security-Policy": _PAGE_POLICY})
