"""Where a step's time goes: some full steps under ``torch.profiler``, summed by part."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from knockon.bench.engine.load import ClosedLoop, synchronise
from knockon.bench.engine.parts import PARTS, part_of

_TOP = 12  # kernels named one by one


@dataclass(frozen=True)
class Profile:
    """Some full decode steps, by part; milliseconds of one step.

    Attributes:
        kind: ``"CUDA kernels"`` or ``"CPU operators"``, whose time is given.
        steps: how many were traced.
        wall_ms: of the traced steps, tracing included.
        parts_ms: time by part, in the order of :data:`PARTS`. The plain rollout's operators are
            counted by what they do; only the fused kernels are a part of their own.
        idle: share of the time between the first kernel's start and the last one's end in which
            the GPU ran none; ``None`` on a CPU.
        top: the kernels that took most: name, part, milliseconds and calls a step.
    """

    kind: str
    steps: int
    wall_ms: float
    parts_ms: dict[str, float]
    idle: float | None
    top: tuple[tuple[str, str, float, float], ...]

    @property
    def busy_ms(self) -> float:
        """All parts together. Kernels that run side by side count each."""
        return sum(self.parts_ms.values())


def trace(loop: ClosedLoop, steps: int) -> Profile | None:
    """Step until every place decodes, then trace up to ``steps`` full steps.

    Returns:
        ``None`` where the requests ended before a step was full.
    """
    engine = loop.engine
    while not loop.full:
        if not engine.has_unfinished:
            return None
        loop.step()
    cuda = engine.runner.target.device.type == "cuda"
    # Tracing the host as well would slow it down, and the GPU would be seen to wait for it.
    activities = [ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]
    synchronise(engine)
    taken = 0
    with profile(activities=activities) as traced:
        start = time.perf_counter()
        while loop.full and taken < steps:
            loop.step()
            taken += 1
        synchronise(engine)
        wall = time.perf_counter() - start
    events = traced.events()
    spans = list(_kernels(events) if cuda else _operators(events))
    idle = _idle([(begin, end) for _, begin, end in spans]) if cuda else None
    kind = "CUDA kernels" if cuda else "CPU operators"
    return _summed(kind, [(name, end - begin) for name, begin, end in spans], taken, wall, idle)


def _kernels(events: Any) -> Iterable[tuple[str, float, float]]:
    """Name, start and end in microseconds of all that ran on the device."""
    for event in events:
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            yield event.name, event.time_range.start, event.time_range.end


def _operators(events: Any) -> Iterable[tuple[str, float, float]]:
    """The same of CPU operators, without what each calls; starts are not kept."""
    for event in events:
        yield event.name, 0.0, float(event.self_cpu_time_total)


def _idle(spans: list[tuple[float, float]]) -> float | None:
    """Share of the time from first start to last end that no span covers."""
    if not spans:
        return None
    spans = sorted(spans)
    busy, reached = 0.0, spans[0][0]
    for begin, end in spans:
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    whole = reached - spans[0][0]
    return 1 - busy / whole if whole else None


def _summed(
    kind: str, times: list[tuple[str, float]], steps: int, wall: float, idle: float | None
) -> Profile:
    by_name: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for name, microseconds in times:
        by_name[name] += microseconds  # type: ignore[assignment]
        calls[name] += 1
    parts = dict.fromkeys(PARTS, 0.0)
    for name, microseconds in by_name.items():
        parts[part_of(name)] += microseconds / 1e3 / steps
    top = tuple(
        (name, part_of(name), microseconds / 1e3 / steps, calls[name] / steps)
        for name, microseconds in by_name.most_common(_TOP)
    )
    return Profile(kind, steps, wall * 1e3 / steps, parts, idle, top)
