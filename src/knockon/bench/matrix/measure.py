"""One cell: what its server is told, and how it is asked."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from knockon.bench.matrix.cells import Cell
from knockon.bench.matrix.folder import DONE, FAILED
from knockon.bench.matrix.methods import TARGET
from knockon.bench.matrix.server import ServerFailed, ServerProcess
from knockon.bench.matrix.settings import MatrixSettings
from knockon.bench.serving.request import Timed
from knockon.bench.serving.run import ServingReport, measure
from knockon.bench.serving.settings import ServingSettings
from knockon.errors import KnockonError

SPECULATIVE = "--speculative-"
MEMORY = ("--mem-fraction-static", "--kv-memory")
# Of a GPU, for the weights and KV of all servers that stand on it at once; the rest is for each
# one's CUDA context, graphs and workspace.
MEMORY_SHARED = 0.75


def serve_arguments(settings: MatrixSettings, cell: Cell) -> list[str]:
    """What a cell's server is told.

    Sequences at once are the concurrency: graphs are then captured for batches that occur. What is
    passed on and begins with ``--speculative-`` is not told a server without a drafter. Servers
    that stand beside others get equal parts of a GPU's memory for weights and KV, unless what is
    passed on sets that.
    """
    method = next(m for m in settings.methods if m.name == cell.method)
    found = ["--model-path", settings.model_path, "--served-model-name", settings.model]
    found += ["--max-running-requests", str(cell.concurrency)]
    found += method.serve_arguments(settings.drafters.get(method.kind))
    passed = {argument.partition("=")[0] for argument in settings.serve_arguments}
    if settings.servers_ahead and passed.isdisjoint(MEMORY):
        found += ["--mem-fraction-static", f"{MEMORY_SHARED / (1 + settings.servers_ahead):.4f}"]
    return found + passed_on(settings.serve_arguments, method.kind != TARGET)


def passed_on(arguments: tuple[str, ...], speculates: bool) -> list[str]:
    """Arguments that a server gets as they are."""
    found: list[str] = []
    keep = True
    for argument in arguments:
        if argument.startswith("--"):
            keep = speculates or not argument.startswith(SPECULATIVE)
        if keep:
            found.append(argument)
    return found


def measure_cell(
    settings: MatrixSettings,
    cell: Cell,
    server: ServerProcess,
    doing: Callable[[str], None] = lambda text: None,
    ended: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Measure a cell on its server, which is ready, and return what its record gains.

    Args:
        doing: told what is under way.
        ended: called after each counted request.
    """
    began = time.perf_counter()
    found: dict[str, Any] = {"began": datetime.now(UTC).isoformat(timespec="seconds")}
    try:
        report = measure(serving_settings(settings, cell, server.url), doing, ended)
        found |= {
            "summary": report.summary.as_dict(),
            "server": report.server,
            "requests": [plain(each, settings.save_texts) for each in report.requests],
        }
        check(report)
        found["status"] = DONE
    except KnockonError as error:
        found |= failure(error, server)
    found["seconds"] = time.perf_counter() - began
    return found


def failure(error: KnockonError, server: ServerProcess) -> dict[str, Any]:
    """What the record of a cell that has failed tells."""
    told = str(error)
    if not isinstance(error, ServerFailed) and (status := server.ended_soon()):
        told += f" (the server has ended with exit code {status})"
    lines = server.last_lines()
    if isinstance(error, ServerFailed) and lines:
        told += f"; its log ends: {lines[-1]}"
    return {"status": FAILED, "error": told, "log": lines}


def serving_settings(settings: MatrixSettings, cell: Cell, url: str) -> ServingSettings:
    """How a cell's server is asked; alike for all methods."""
    workload = next(w for w in settings.workloads if w.name == cell.workload)
    count = settings.prompts_of(workload, cell.concurrency)
    return ServingSettings(
        base_url=url,
        dataset=workload.path,
        num_prompts=None if count == workload.prompts else count,
        output_len=settings.output_len,
        max_concurrency=cell.concurrency,
        request_rate=settings.request_rate,
        warmup_requests=settings.warmups_at(cell.concurrency),
        seed=settings.seed,
        chat=settings.chat,
        flush_cache=True,  # or the first prompt, which warms up, would be had for nothing
        ignore_eos=settings.ignore_eos,
        temperature=settings.temperature,
        timeout=settings.request_timeout,
    )


def check(report: ServingReport) -> None:
    """Hold a run to all its requests: a rate over some of them compares with nothing.

    Raises:
        ServerFailed: some failed.
    """
    errors = [each.error for each in report.requests if each.error]
    if errors:
        told = f"{len(errors)} of {len(report.requests)} requests failed: {errors[0]}"
        raise ServerFailed(told)


def plain(timed: Timed, with_text: bool) -> dict[str, Any]:
    """A request for JSON. The digest tells answers apart without keeping them."""
    found: dict[str, Any] = {
        "name": timed.name,
        "prompt_tokens": timed.prompt_tokens,
        "output_tokens": timed.output_tokens,
        "finish_reason": timed.finish_reason,
        "ttft": round(timed.ttft, 6),
        "e2e": round(timed.e2e, 6),
        "verifications": timed.verifications,
        "kept": timed.kept,
        "text_sha256": hashlib.sha256(timed.text.encode()).hexdigest()[:32],
    }
    if with_text:
        found["text"] = timed.text
    if timed.error:
        found["error"] = timed.error
    return found
