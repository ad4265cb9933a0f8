"""``LLM``: offline generation, on one rank in this process or on several of their own."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Sequence
from types import TracebackType
from typing import Any

from knockon.engine.assemble import build_engine, check
from knockon.engine.config import EngineConfig
from knockon.engine.engine import Engine, StepOutput, checked_prompt
from knockon.engine.noise import fresh_seed
from knockon.engine.request import RequestOutput
from knockon.engine.sampling_params import SamplingParams
from knockon.errors import Refused
from knockon.models.target import read_config
from knockon.models.tokenizer import load_tokenizer
from knockon.parallel import SingleRank
from knockon.parallel.launch import RankPool

Message = dict[str, str]
Prompt = str | Sequence[int] | Sequence[Message]


class LLM:
    """A model, and a drafter that makes it faster without changing a token.

    Args:
        model: catalogue name, Hugging Face folder, GGUF file or hub id.
        draft: a drafter made for that model, named likewise; ``None`` for none.
        tp_size: ranks that share the model, each a process of its own.
        dtype: ``"auto"``, ``"bfloat16"``, ``"float16"``, ``"float32"`` or ``"float64"``.
        settings: the other fields of :class:`EngineConfig`.

    Raises:
        Refused: settings, names or weights that do not fit together.
        RankFailed: a rank could not be started.
    """

    def __init__(
        self,
        model: str,
        draft: str | None = None,
        tp_size: int = 1,
        dtype: str = "auto",
        **settings: Any,
    ) -> None:
        unknown = sorted(settings.keys() - EngineConfig.__dataclass_fields__.keys())
        if unknown:
            known = ", ".join(sorted(EngineConfig.__dataclass_fields__))
            raise Refused("setting", unknown[0], f"one of {known}")
        asked = EngineConfig(model=model, draft=draft, tp_size=tp_size, dtype=dtype, **settings)
        self.config = check(asked)
        self._pool: RankPool | None = None
        self._engine: Engine | None = None
        self._ids = itertools.count()
        if tp_size == 1:
            self._engine = build_engine(self.config, SingleRank())
            self.tokenizer = self._engine.tokenizer
        else:
            self.tokenizer = load_tokenizer(self.config.model)
            self._pool = RankPool(
                tp_size,
                "knockon.engine.worker:build_worker",
                {"config": self.config},
                backend="nccl" if self.config.device == "cuda" else "gloo",
            )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, batched continuously; results in the order of the prompts.

        Args:
            prompts: one prompt or a list of them. A string is continued as it stands; a list of
                ``{"role", "content"}`` messages goes through the model's chat template; a list of
                integers is taken as token ids.
            sampling_params: for all, or one each.

        Raises:
            Refused: a prompt or parameters that cannot be served; nothing is generated then.
            RankFailed: a rank died.
        """
        batch = as_prompts(prompts)
        if sampling_params is None:
            sampling_params = SamplingParams()
        if isinstance(sampling_params, SamplingParams):
            params = [sampling_params] * len(batch)
        else:
            params = list(sampling_params)
        if len(params) != len(batch):
            raise Refused("sampling_params", f"{len(params)} of them", f"one, or {len(batch)}")
        ids: list[str] = []
        results: dict[str, RequestOutput] = {}
        try:
            for prompt, each in zip(batch, params, strict=True):
                ids.append(self.add(prompt, each))
            while len(results) < len(ids):
                for output in self.step():
                    if output.finished is not None:
                        results[output.request_id] = output.finished
        except BaseException:
            for request_id in ids:
                if request_id not in results and not self.failed:
                    self.abort(request_id)
            raise
        return [results[request_id] for request_id in ids]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Generator[StepOutput, None, None]:
        """Complete one prompt, yielding what each step adds; closing the iterator aborts it."""
        request_id = self.add(prompt, sampling_params or SamplingParams())
        done = False
        try:
            while not done:
                for output in self.step():
                    if output.request_id == request_id:
                        done = output.finished is not None
                        yield output
        finally:
            if not done and not self.failed:
                self.abort(request_id)

    def add(self, prompt: Prompt, params: SamplingParams) -> str:
        """Queue one prompt and return its id; :meth:`step` advances it."""
        ids = self.encode(prompt)
        request_id = str(next(self._ids))
        seed = params.seed if params.seed is not None else fresh_seed()
        self._call("add", request_id, ids, params, seed)
        return request_id

    def step(self) -> list[StepOutput]:
        """Advance every request by one step."""
        outputs: list[StepOutput] = self._call("step")
        return outputs

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now; ``None`` if it has already ended."""
        output: RequestOutput | None = self._call("abort", request_id)
        return output

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt.

        Raises:
            Refused: an empty prompt, messages without a role or content, or a model without a chat
                template.
        """
        if isinstance(prompt, str):
            if not prompt:
                raise Refused("prompt", prompt, "text that is not empty")
            return list(self.tokenizer.encode(prompt))
        if prompt and isinstance(prompt[0], dict):
            return self._encode_messages(prompt)  # type: ignore[arg-type]
        return checked_prompt(prompt, 1 << 31)  # type: ignore[arg-type]

    def _encode_messages(self, messages: Sequence[Message]) -> list[int]:
        for message in messages:
            for key in ("role", "content"):
                if not isinstance(message.get(key), str):
                    raise Refused(f"message {key}", message.get(key), "a string")
        if not self.tokenizer.chat_template:
            raise Refused("chat_template", None, "a model whose tokenizer has one")
        return list(
            self.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
            )
        )

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a generation unless ``ignore_eos`` is asked for."""
        return read_config(self.config.model).eos_token_ids

    @property
    def failed(self) -> bool:
        """Whether a rank has died, after which nothing more can be generated."""
        return self._pool is not None and self._pool.failure is not None

    def _call(self, method: str, *args: object) -> Any:
        if self._pool is not None:
            return self._pool.call(method, *args)
        if self._engine is None:
            raise Refused("LLM", "closed", "an LLM that has not been closed")
        return getattr(self._engine, method)(*args)

    def close(self) -> None:
        """Free the models and end the ranks; may be called twice."""
        if self._pool is not None:
            self._pool.close()
        self._engine = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list.

    Raises:
        Refused: an empty list.
    """
    if isinstance(prompts, str):
        return [prompts]
    if not prompts:
        raise Refused("prompts", prompts, "at least one prompt")
    if isinstance(prompts[0], int | dict):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
