"""A target and its drafter loaded once, and the engines that are put around them in turn."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from knockon.drafters.base import Drafter
from knockon.drafters.config import DraftConfig
from knockon.drafters.load import load_drafter, read_draft_config
from knockon.drafters.mtp_config import MTPConfig
from knockon.engine.build_runner import build_runner, this_device
from knockon.engine.config import EngineConfig
from knockon.engine.engine import Engine
from knockon.engine.flight import Runner
from knockon.engine.memory import KVBudget
from knockon.engine.request import RequestOutput
from knockon.engine.sampling_params import SamplingParams
from knockon.engine.settle import block_size_of, check, sizes_of
from knockon.engine.width import WidthPolicy
from knockon.layers.attention import PagedBackend, SdpaBackend
from knockon.models.target import POSITION_SLACK, Target, load_target
from knockon.models.tokenizer import load_tokenizer
from knockon.parallel import SingleRank


@dataclass(frozen=True)
class BoundRunner:
    """A runner with its KV and graphs; engines may follow one another on it, each once idle."""

    runner: Runner
    budget: KVBudget
    config: EngineConfig
    widths: tuple[int, ...]


class LoadedModels:
    """Both models on one device.

    Args:
        config: with ``max_model_len``; names may be a catalogue's.

    Raises:
        Refused: as :func:`~knockon.engine.settle.check` and the loaders.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = check(config)
        c = self.config
        assert c.max_model_len is not None
        self.draft_config: DraftConfig | MTPConfig | None = None
        block = 1
        if c.draft is not None:
            self.draft_config = read_draft_config(Path(c.draft))
            block = block_size_of(c, self.draft_config)
        self.block_size = block
        self.tokenizer: Any = load_tokenizer(Path(c.model))
        attention = PagedBackend() if c.attention_backend == "triton" else SdpaBackend()
        positions = c.max_model_len + max(POSITION_SLACK, 4 * block)
        self.target: Target = load_target(
            Path(c.model),
            getattr(torch, c.dtype),
            SingleRank(),
            this_device(c.device, SingleRank()),
            positions,
        )
        self.target.attention = attention
        self.target.pack()
        self.drafter: Drafter | None = None
        if c.draft is not None:
            self.drafter = load_drafter(
                Path(c.draft),
                self.target,
                attention,
                c.max_model_len,
                c.speculative_domino_candidate_pool_size,
                c.speculative_domino_exchange,
                c.speculative_draft_head_dtype,
                c.mtp_steps(),
            )

    def runner(self, drafter: Drafter | None, widths: Sequence[int]) -> BoundRunner:
        """Allocate KV and capture graphs for a drafter (or none) at these widths, ascending.

        A drafter serves one runner at a time: its own KV is made anew.
        """
        c, limit = self.config, self.config.max_model_len
        assert limit is not None
        drafted = None
        if drafter is not None:
            assert self.draft_config is not None
            drafted = self.draft_config.sizes
        rows = self.block_size if drafter is not None else 1
        runner, budget = build_runner(
            c, self.target, drafter, drafted, limit, rows, widths, self.target.group
        )
        return BoundRunner(runner, budget, c, tuple(widths))

    def engine(self, bound: BoundRunner, widths: WidthPolicy) -> Engine:
        """A fresh engine on a runner.

        Its pages are the same as those of the runner's other engines: without a prefix cache they
        may take turns, each while the others are idle.
        """
        sizes = sizes_of(self.config)
        return Engine(
            bound.runner,
            self.tokenizer,
            num_pages=bound.budget.num_pages,
            max_batch_size=sizes.max_batch_size,
            prefill_chunk=sizes.prefill_chunk,
            max_length=bound.budget.max_length,
            widths=widths,
            prefix_cache=self.config.prefix_cache,
            states=bound.budget.states,
        )


def mean_accept_length(outputs: Sequence[RequestOutput]) -> float:
    """Tokens kept per verification, over all of the answers; 0 where nothing was verified."""
    lengths = [length for output in outputs for length in output.metrics.accept_lengths]
    return fmean(lengths) if lengths else 0.0


def answer(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    concurrency: int,
    seeds: Sequence[int] | None = None,
    ended: Callable[[], None] = lambda: None,
) -> tuple[list[RequestOutput], float]:
    """Answer token ids, so many at a time: the next is added when one ends.

    Returns:
        Results in the order of the prompts, and the seconds that all took.
    """
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    found: dict[str, RequestOutput] = {}
    waiting = itertools.count()
    start = time.perf_counter()

    def add() -> None:
        number = next(waiting)
        if number < len(prompts):
            seed = 0 if seeds is None else seeds[number]
            engine.add(str(number), prompts[number], each[number], seed)

    for _ in range(concurrency):
        add()
    while len(found) < len(prompts):
        for output in engine.step():
            if output.finished is not None:
                found[output.request_id] = output.finished
                ended()
                add()
    seconds = time.perf_counter() - start
    while engine.step():  # whatever is left in flight
        pass
    return [found[str(number)] for number in range(len(prompts))], seconds
