"""``/v1``: models, completions, chat completions."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from knockon.server.answer_parts import AnswerParts, ChatParts, CompletionParts
from knockon.server.bodies import ChatBody, CompletionBody
from knockon.server.generation_response import GenerationResponse, Manner
from knockon.server.sampling import sampling_params
from knockon.server.state import ServerState
from knockon.server.unsupported import refuse_unsupported

router = APIRouter(prefix="/v1")


def _state(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


def _model_card(state: ServerState) -> dict[str, Any]:
    capacity = state.engine.capacity
    return {
        "id": state.settings.model_name,
        "object": "model",
        "created": int(state.started),
        "owned_by": "knockon",
        "max_model_len": capacity.max_length if capacity is not None else None,
    }


@router.get("/models")
async def models(request: Request) -> dict[str, Any]:
    """The one model that is served."""
    return {"object": "list", "data": [_model_card(_state(request))]}


@router.get("/models/{name:path}")
async def model(name: str, request: Request) -> dict[str, Any]:
    """The model by its name."""
    state = _state(request)
    state.check_model(name)
    return _model_card(state)


@router.post("/completions", response_model=None)
async def completions(body: CompletionBody, request: Request) -> Response:
    """Continue text as it stands."""
    return await _generate(body, request)


@router.post("/chat/completions", response_model=None)
async def chat_completions(body: ChatBody, request: Request) -> Response:
    """Answer a conversation."""
    return await _generate(body, request)


async def _generate(body: ChatBody | CompletionBody, request: Request) -> Response:
    arrival = time.perf_counter()
    state, size = _state(request), len(await request.body())  # read before, to make `body` of it
    capacity, encoder = state.serving()
    state.check_model(body.model)
    refuse_unsupported(body)
    each = body.n or 1
    expected = each if isinstance(body, ChatBody) else each * _count(body)
    state.admit(expected, capacity)
    state.waiting_to_encode += expected
    try:
        if isinstance(body, ChatBody):
            prompts = [await encoder.chat(body, size)]
        else:
            prompts = await encoder.completion(body, capacity.vocab_size, size)
    finally:
        state.waiting_to_encode -= expected
    longest = max(len(prompt) for prompt in prompts)
    params = sampling_params(body, longest, capacity.max_length, state.fallback_seed())
    capacity, encoder = state.serving()  # the engine may have failed meanwhile
    submission = state.engine.submit(
        [prompt for prompt in prompts for _ in params], params * len(prompts), arrival
    )
    prompt_tokens = sum(map(len, prompts))
    state.metrics.prompted(prompt_tokens * len(params))
    parts: AnswerParts
    if isinstance(body, ChatBody):
        parts, logprobs = ChatParts(encoder.tokenizer), bool(body.logprobs)
    else:
        parts = CompletionParts(encoder.tokenizer, expected)
        logprobs = body.logprobs is not None
    options = body.stream_options
    manner = Manner(
        model=state.settings.model_name,
        stream=bool(body.stream),
        logprobs=logprobs,
        usage=bool(options and options.include_usage),
        usage_always=bool(options and options.continuous_usage_stats),
    )
    return CountedResponse(
        state,
        GenerationResponse(
            submission, parts, manner, expected, len(prompts), prompt_tokens, state.metrics
        ),
    )


def _count(body: CompletionBody) -> int:
    """Prompts in the body."""
    if isinstance(body.prompt, str) or isinstance(body.prompt[0], int):
        return 1
    return len(body.prompt)


class CountedResponse(Response):
    """A generation that the server's end waits for."""

    def __init__(self, state: ServerState, inner: Response) -> None:
        self.background = None
        self._state = state
        self._inner = inner

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer."""
        self._state.open_requests += 1
        try:
            await self._inner(scope, receive, send)
        finally:
            self._state.open_requests -= 1
