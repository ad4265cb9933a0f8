"""``LLM``: offline generation, on one rank in this process or on several of their own."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Generator, Sequence
from types import TracebackType
from typing import Any

from knockon.engine.assemble import build_engine
from knockon.engine.config import EngineConfig
from knockon.engine.engine import Engine, StepOutput
from knockon.engine.mailboxes import Mailboxes, take
from knockon.engine.metrics import EngineMetrics
from knockon.engine.noise import fresh_seed
from knockon.engine.occupancy import Capacity, Occupancy
from knockon.engine.prompts import Prompt, as_prompts, encode_prompt
from knockon.engine.rank_calls import RankCalls
from knockon.engine.request import RequestOutput
from knockon.engine.sampling_params import SamplingParams
from knockon.engine.settle import check
from knockon.errors import KnockonError, RankFailed, Refused
from knockon.models.target import read_config
from knockon.models.tokenizer import load_tokenizer
from knockon.parallel import SingleRank
from knockon.parallel.launch import RankPool


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
        model: str | os.PathLike[str],
        draft: str | os.PathLike[str] | None = None,
        tp_size: int = 1,
        dtype: str = "auto",
        **settings: Any,
    ) -> None:
        unknown = sorted(settings.keys() - EngineConfig.__dataclass_fields__.keys())
        if unknown:
            known = ", ".join(sorted(EngineConfig.__dataclass_fields__))
            raise Refused("setting", unknown[0], f"one of {known}")
        names: dict[str, Any] = {"model": model, "draft": draft}
        for field, name in names.items():
            if isinstance(name, os.PathLike):
                names[field] = os.fspath(name)
        asked = EngineConfig(**names, tp_size=tp_size, dtype=dtype, **settings)
        self.config = check(asked)
        self._pool: RankPool | None = None
        self._ranks: RankCalls | None = None
        self._engine: Engine | None = None
        self._closed = False
        self._ids = itertools.count()
        self._mail = Mailboxes()
        # Held while the engine works: callers on other threads wait their turn. Re-entrant, since
        # a signal's handler may end a request that the interrupted thread is running.
        self._turn = threading.RLock()
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
            self._ranks = RankCalls(self._pool)

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
        box: list[StepOutput] = []
        results: dict[str, RequestOutput] = {}
        try:
            for prompt, each in zip(batch, params, strict=True):
                ids.append(self._add(prompt, each, box, stream=False))
            while len(results) < len(ids):
                for output in self._next_outputs(box):
                    if output.finished is not None:
                        results[output.request_id] = output.finished
        finally:
            self._leave(ids, [request_id for request_id in ids if request_id not in results])
        return [results[request_id] for request_id in ids]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Generator[StepOutput, None, None]:
        """Complete one prompt, yielding what each step adds; closing the iterator aborts it."""
        box: list[StepOutput] = []
        request_id = self._add(prompt, sampling_params or SamplingParams(), box)
        done = False
        try:
            while not done:
                for output in self._next_outputs(box):
                    done = output.finished is not None
                    yield output
        finally:
            self._leave([request_id], [] if done else [request_id])

    def add(self, prompt: Prompt, params: SamplingParams) -> str:
        """Queue one prompt and return its id; every step advances it, :meth:`step` reports on it.

        Steps that :meth:`generate` and :meth:`stream` take meanwhile advance it too; what it
        gained then is kept for the next :meth:`step`.
        """
        return self._add(prompt, params)

    def step(self) -> list[StepOutput]:
        """Advance every request by one step; what those queued with :meth:`add` have gained."""
        self._advance()
        return self._mail.take_shared()

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now; ``None`` if it has already ended.

        A :meth:`generate` or :meth:`stream` that waits for it gets the same result, and goes on.
        """

        def tell(output: RequestOutput | None) -> None:
            if output is not None and self._mail.owned(request_id):
                self._mail.deliver([StepOutput(request_id, "", [], output)])

        aborted: RequestOutput | None = self._call("abort", request_id, then=tell)
        return aborted

    def metrics(self) -> EngineMetrics:
        """What the engine has done since it was made: exchanges taken, accept lengths, NaN rows.

        It may be asked for at any time and waits for a step that is under way.
        """
        metrics: EngineMetrics = self._call("metrics")
        return metrics

    def capacity(self) -> Capacity:
        """What the engine was made to hold: context, batch, pages."""
        capacity: Capacity = self._call("capacity")
        return capacity

    def occupancy(self) -> Occupancy:
        """The requests and pages it holds now."""
        occupancy: Occupancy = self._call("occupancy")
        return occupancy

    def flush_cache(self) -> int:
        """Forget earlier prompts' KV, as far as no request uses it; how many pages were dropped."""
        dropped: int = self._call("flush_cache")
        return dropped

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt; raises as :func:`~knockon.engine.prompts.encode_prompt`."""
        return encode_prompt(self.tokenizer, prompt)

    def _add(
        self,
        prompt: Prompt,
        params: SamplingParams,
        box: list[StepOutput] | None = None,
        stream: bool = True,
    ) -> str:
        """Queue a prompt whose outputs go into ``box``, or the one shared by all without."""
        if not isinstance(params, SamplingParams):
            raise Refused("sampling_params", params, "SamplingParams")
        ids = self.encode(prompt)
        seed = params.seed if params.seed is not None else fresh_seed()
        with self._turn:
            request_id = str(next(self._ids))
            try:
                if box is not None:
                    self._mail.open(request_id, box)
                self._call("add", request_id, ids, params, seed, stream)
            except BaseException as error:
                # Interrupted, the engine may have it all the same, and nobody would know its name.
                self._leave([request_id], [] if isinstance(error, KnockonError) else [request_id])
                raise
        return request_id

    def _next_outputs(self, box: list[StepOutput]) -> list[StepOutput]:
        """What has come into a box; a step is taken where nothing has."""
        with self._turn:
            if not box:
                self._advance()
            return take(box)

    def _advance(self) -> None:
        self._call("step", then=self._mail.deliver)

    def _leave(self, ids: Sequence[str], unfinished: Sequence[str]) -> None:
        """Give up a call's boxes, and end those of its requests that still run."""
        with self._turn:  # or a step of another thread would find requests without a box
            for request_id in unfinished:
                if not self.failed and not self._closed:
                    self._call("abort", request_id)
            for request_id in ids:
                self._mail.close(request_id)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a generation unless ``ignore_eos`` is asked for."""
        return read_config(self.config.model).eos_token_ids

    @property
    def failed(self) -> bool:
        """Whether a rank has died, after which nothing more can be generated."""
        return self.failure is not None

    @property
    def failure(self) -> RankFailed | None:
        """What ended the ranks, known between calls too; ``None`` while all is well."""
        return self._pool.failure if self._pool is not None else None

    def model_sizes(self) -> dict[str, Any]:
        """The target's sizes as plain data: ``hidden_size``, ``num_layers`` and so on.

        Those of recurrent layers, where it has such, are under ``recurrent``.
        """
        config = read_config(self.config.model)
        sizes: dict[str, Any] = _plain(vars(config))
        if config.delta is not None:
            layers = {"num_layers": sum(config.delta.layers)}
            sizes["recurrent"] = _plain(vars(config.delta)) | layers
        return sizes

    def _call(
        self, method: str, *args: object, then: Callable[[Any], None] = lambda value: None
    ) -> Any:
        """Call the engine, and do with the result what is to be done with it."""
        with self._turn:
            if self._closed:
                raise Refused("LLM", "closed", "an LLM that has not been closed")
            if self._ranks is not None:
                return self._ranks.call(method, *args, then=then)
            value = getattr(self._engine, method)(*args)
            then(value)
            return value

    def close(self) -> None:
        """Free the models and end the ranks; may be called twice."""
        self._closed = True
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


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if isinstance(value, int | str)}
