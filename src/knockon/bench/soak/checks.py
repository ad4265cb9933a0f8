"""What must hold once all requests have ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from knockon.bench.loaded import answer
from knockon.bench.soak.run import SoakRun
from knockon.bench.soak.traffic import SoakRequest
from knockon.engine.engine import Engine
from knockon.engine.request import RequestOutput
from knockon.engine.sampling_params import SamplingParams

MEMORY_SETTLES, MEMORY_MOVES = 0.2, 0.05
# In log-probability: kernels that sum in another order may tell so near a tie otherwise.
NEAR_TIE = {"float32": 1e-3, "float64": 1e-9}


@dataclass(frozen=True)
class Check:
    """One thing that must hold.

    Attributes:
        passed: ``None`` where it cannot be looked at here.
    """

    name: str
    passed: bool | None
    found: str


def check_idle(engine: Engine, run: SoakRun) -> list[Check]:
    """That an engine whose requests have all ended holds nothing of them.

    Runs as many short requests at once as slots and pages allow, to see that both can be had again.
    """
    scheduler, pool = engine.scheduler, engine.scheduler.pool
    waiting, running = len(scheduler.waiting), len(scheduler.running)
    checks = [
        Check(
            "nothing waits, runs or is in flight",
            not (waiting or running or run.left_over or engine.has_unfinished),
            f"{waiting} waiting, {running} running, {run.left_over} outputs left over",
        ),
        Check(
            "all pages are back",
            pool.available == pool.usable,
            f"{pool.available} of {pool.usable} available",
        ),
    ]
    batch = scheduler.max_batch_size
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    for number in range(batch):
        engine.add(f"slot {number}", [1 + number % 7], params, 0)
    # One page more a request is held back at admission, for its next block.
    expected = min(batch, pool.usable // (pool.pages_for(1 + scheduler.block_rows) + 1))
    held: list[int] = []
    while engine.has_unfinished:
        engine.step()
        held = max(held, [request.slot for request in scheduler.running], key=len)
    engine.step()
    sound = len(set(held)) == len(held) and set(held) <= set(range(batch))
    checks.append(
        Check(
            "all slots are free",
            sound and len(held) >= expected,
            f"{len(held)} of {batch} held at once, {expected} by pages",
        )
    )
    checks.append(
        Check(
            "all pages are back again",
            pool.available == pool.usable,
            f"{pool.available} of {pool.usable} available",
        )
    )
    return checks


def check_memory(run: SoakRun, seconds: float) -> Check:
    """That what tensors take stays where it was after the first fifth of the run."""
    found = [taken for when, taken in run.memory if when >= MEMORY_SETTLES * seconds]
    name = "memory is flat"
    if not found:
        return Check(name, None, "measured on GPUs only")
    moved = (max(found) - min(found)) / min(found)
    mib = f"{min(found) / 2**20:.1f} to {max(found) / 2**20:.1f} MiB"
    return Check(name, moved <= MEMORY_MOVES, f"{mib} over {len(found)} readings")


@dataclass(frozen=True)
class Difference:
    """Where an answer first leaves the reference's.

    Attributes:
        margin: by which log-probability the reference prefers its own token; ``None`` where one
            answer only goes on longer.
    """

    request: str
    kind: str
    prompt_tokens: int
    at: int
    margin: float | None


def compare(
    samples: Sequence[tuple[SoakRequest, RequestOutput]],
    reference: Engine,
    concurrency: int,
) -> list[Difference]:
    """Ask a slow engine the same, and tell what is otherwise."""
    params = [_with_logprobs(request.params) for request, _ in samples]
    prompts = [request.prompt for request, _ in samples]
    wanted, _ = answer(reference, prompts, params, concurrency)
    differences = []
    for (request, ours), theirs in zip(samples, wanted, strict=True):
        if ours.token_ids == theirs.token_ids and ours.finish_reason == theirs.finish_reason:
            continue
        pairs = list(zip(ours.token_ids, theirs.token_ids, strict=False))
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        margin = None
        if at < len(pairs):
            assert theirs.logprobs is not None
            place = theirs.logprobs[at]
            other = place.top.get(ours.token_ids[at])
            margin = float("inf") if other is None else place.logprob - other
        differences.append(Difference(request.id, request.kind, len(request.prompt), at, margin))
    return differences


def check_answers(differences: Sequence[Difference], count: int, dtype: str) -> Check:
    """That the sampled answers are the reference's, but for ties that rounding may tell otherwise.

    Only FP32 and above are judged: in BF16 near ties are many, and their margins are reported.
    """
    limit = NEAR_TIE.get(dtype)
    same = count - len(differences)
    found = f"{same} of {count} identical"
    if differences:
        margins = ["length" if d.margin is None else f"{d.margin:.2g}" for d in differences]
        found += f"; margins {', '.join(margins)}"
    if limit is None:
        return Check("answers are the reference's", None, found)
    wrong = [d for d in differences if d.margin is None or not abs(d.margin) <= limit]
    return Check("answers are the reference's", count > 0 and not wrong, found)


def _with_logprobs(params: SamplingParams) -> SamplingParams:
    return replace(params, logprobs=5)


def plain(difference: Difference) -> dict[str, Any]:
    """For JSON."""
    return asdict(difference)
