"""What an engine has done since it was made: counted on the host, step by step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from knockon.drafters.base import Drafter
from knockon.engine.part_times import PARTS


@dataclass(frozen=True)
class EngineMetrics:
    """A snapshot of one engine.

    Attributes:
        draft: ``"domino"``, ``"dflash"`` or ``"mtp"``; ``None`` where nothing is drafted.
        verify_width: positions verified at a time, or ``"auto"``.
        widths: steps by the width they verified.
        candidate_pool_size: Domino's ``K`` in force, 0 for the whole vocabulary; ``None`` for
            other drafters.
        implementation: ``"fused"`` where Domino's rollout runs the GPU kernels, ``"plain"`` where
            it runs PyTorch's; ``None`` for other drafters.
        why_plain: why it does not run the kernels; empty where it does.
        exchange: how base logits were asked to cross ranks: ``auto``, ``full`` or ``compact``;
            ``None`` for other drafters than Domino.
        exchanges: steps by the exchange they took. On one rank ``full`` moves nothing.
        gate_table_bytes: memory of the table of input gates on each rank, 0 without one.
        draft_head_dtype: of the LM head that proposes: the target's, or ``"fp8"`` for a copy of it;
            ``None`` where nothing is drafted.
        draft_head_bytes: memory of that copy on each rank, 0 without one.
        nan_rows: rows of base logits that held a NaN, over all ranks; a row counts once for each
            rank whose shard had one.
        steps: decode steps.
        blocks: blocks drafted, one a request a step.
        accept_lengths: verifications by the number of tokens kept, bonus included; those of
            requests with speculation off are not counted.
        timed_steps: decode steps whose tokens have been read.
        step_seconds: what those took, prefill left out.
        part_seconds: of those, what each of :data:`~knockon.engine.part_times.PARTS` took; empty
            where a step is launched as a whole (on GPUs).
    """

    draft: str | None
    verify_width: int | str
    widths: dict[int, int]
    candidate_pool_size: int | None
    implementation: str | None
    why_plain: str
    exchange: str | None
    exchanges: dict[str, int]
    gate_table_bytes: int
    draft_head_dtype: str | None
    draft_head_bytes: int
    nan_rows: int
    steps: int
    blocks: int
    accept_lengths: dict[int, int]
    timed_steps: int
    step_seconds: float
    part_seconds: dict[str, float]

    @property
    def mean_accept_length(self) -> float:
        """Mean tokens gained per verification; 0 where none was made."""
        count = sum(self.accept_lengths.values())
        total = sum(length * n for length, n in self.accept_lengths.items())
        return total / count if count else 0.0


@dataclass
class Tally:
    """The counts behind a snapshot."""

    steps: int = 0
    blocks: int = 0
    widths: Counter[int] = field(default_factory=Counter)
    exchanges: Counter[str] = field(default_factory=Counter)
    accept_lengths: Counter[int] = field(default_factory=Counter)
    timed_steps: int = 0
    step_seconds: float = 0.0
    part_seconds: dict[str, float] = field(default_factory=dict)

    def step(self, batch: int, width: int, drafter: Drafter | None) -> None:
        """Count a decode step of ``batch`` requests, and the exchange that its sizes decide."""
        self.steps += 1
        self.widths[width] += 1
        if drafter is None or width == 1:
            return
        self.blocks += batch
        exchange = drafter.exchange_for(batch, width - 1)
        if exchange is not None:
            self.exchanges[exchange] += 1

    def landed(self, seconds: float, parts: Sequence[float]) -> None:
        """Count the time of a decode step; ``parts`` as :class:`~knockon.engine.flight.Flight`."""
        self.timed_steps += 1
        self.step_seconds += seconds
        for part, took in zip(PARTS, parts, strict=False):
            self.part_seconds[part] = self.part_seconds.get(part, 0.0) + took

    def snapshot(self, width: int | str, drafter: Drafter | None) -> EngineMetrics:
        """Read the device where a count lies there; on several ranks, all must ask together."""
        report = drafter.report() if drafter is not None else None
        return EngineMetrics(
            draft=drafter.name if drafter is not None else None,
            verify_width=width,
            widths=dict(sorted(self.widths.items())),
            candidate_pool_size=report.pool_size if report is not None else None,
            implementation=report.implementation if report is not None else None,
            why_plain=report.why_plain if report is not None else "",
            exchange=report.exchange if report is not None else None,
            exchanges=dict(self.exchanges),
            gate_table_bytes=report.gate_table_bytes if report is not None else 0,
            draft_head_dtype=report.head_dtype if report is not None else None,
            draft_head_bytes=report.head_bytes if report is not None else 0,
            nan_rows=report.nan_rows if report is not None else 0,
            steps=self.steps,
            blocks=self.blocks,
            accept_lengths=dict(sorted(self.accept_lengths.items())),
            timed_steps=self.timed_steps,
            step_seconds=self.step_seconds,
            part_seconds=dict(self.part_seconds),
        )
