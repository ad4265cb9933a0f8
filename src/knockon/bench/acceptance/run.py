"""The run: a method after the other through the serving engine, a workload after the other."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence

import torch

from knockon.bench.acceptance.methods import Method
from knockon.bench.acceptance.report import AcceptanceReport, AcceptanceSettings, Cell
from knockon.bench.acceptance.workloads import Workload
from knockon.bench.environment import environment
from knockon.engine.llm import LLM
from knockon.engine.request import RequestOutput
from knockon.engine.sampling_params import SamplingParams

_WARM_UP_TOKENS = 16


def measure(
    settings: AcceptanceSettings,
    methods: Sequence[Method],
    workloads: Sequence[Workload],
    doing: Callable[[str], None] = lambda text: None,
    ended: Callable[[], None] = lambda: None,
    done: Callable[[str], None] = lambda text: None,
) -> AcceptanceReport:
    """Carry out a run.

    Args:
        doing: told what is under way.
        ended: called at the end of every request.
        done: told a line for each method and workload.
    """
    cells: dict[tuple[str, str], Cell] = {}
    alone: dict[str, list[list[int]]] = {}
    device = dtype = ""
    for method in methods:
        doing(f"{method.title}: loading")
        with open_engine(settings, method) as llm:
            device, dtype = llm.config.device, llm.config.dtype
            _warm_up(llm, settings, workloads[0])
            for workload in workloads:
                doing(f"{method.title}: {workload.title}")
                outputs, seconds = answer(llm, settings, workload, ended)
                texts = [output.token_ids for output in outputs]
                if method.width == 1:
                    alone[workload.name] = texts
                cell = _cell(outputs, seconds, alone.get(workload.name))
                cells[method.name, workload.name] = cell
                done(progress_line(method, workload, cell))
        gc.collect()  # before the next is loaded: both would not fit where KV takes what is free
        if device == "cuda":
            torch.cuda.empty_cache()
    name = torch.cuda.get_device_name() if device == "cuda" else "a CPU"
    return AcceptanceReport(
        settings, tuple(methods), tuple(workloads), cells, name, dtype, environment()
    )


def open_engine(settings: AcceptanceSettings, method: Method) -> LLM:
    """The engine that serves, for one method."""
    return LLM(
        settings.model,
        method.draft,
        settings.tp_size,
        settings.dtype,
        device=settings.device,
        speculative_algorithm="MTP" if method.kind == "mtp" else None,
        verify_width=method.width,
        speculative_domino_candidate_pool_size=settings.pool_size,
        max_batch_size=settings.concurrency,
    )


def answer(
    llm: LLM, settings: AcceptanceSettings, workload: Workload, ended: Callable[[], None]
) -> tuple[list[RequestOutput], float]:
    """Every prompt of a workload, in their order, and the seconds that all of them took."""
    begun = time.perf_counter()
    ids = [
        llm.add([{"role": "user", "content": prompt}], _params(settings, number))
        for number, prompt in enumerate(workload.prompts)
    ]
    found: dict[str, RequestOutput] = {}
    while len(found) < len(ids):
        for output in llm.step():
            if output.finished is not None:
                found[output.request_id] = output.finished
                ended()
    return [found[each] for each in ids], time.perf_counter() - begun


def progress_line(method: Method, workload: Workload, cell: Cell) -> str:
    """One line on one method and workload."""
    same = "" if cell.same is None else f", {cell.same} of {cell.prompts} as the target alone"
    return (
        f"{method.title:<12} {workload.title:<10} accept length {cell.accept_length:6.3f}, "
        f"{cell.tokens_per_second:8.1f} tok/s{same}"
    )


def _params(settings: AcceptanceSettings, number: int) -> SamplingParams:
    return SamplingParams(
        temperature=settings.temperature,
        max_tokens=settings.max_tokens,
        seed=settings.seed + number,
    )


def _warm_up(llm: LLM, settings: AcceptanceSettings, workload: Workload) -> None:
    prompts = [[{"role": "user", "content": p}] for p in workload.prompts[: settings.concurrency]]
    llm.generate(
        prompts,  # type: ignore[arg-type]
        SamplingParams(temperature=settings.temperature, max_tokens=_WARM_UP_TOKENS),
    )


def _cell(outputs: Sequence[RequestOutput], seconds: float, alone: list[list[int]] | None) -> Cell:
    lengths = [length for output in outputs for length in output.metrics.accept_lengths]
    same = None
    if alone is not None:
        same = sum(o.token_ids == a for o, a in zip(outputs, alone, strict=True))
    tokens = sum(len(output.token_ids) for output in outputs)
    return Cell(len(outputs), tokens, sum(lengths), len(lengths), seconds, same)
