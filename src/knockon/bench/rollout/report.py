"""What a run measured, as plain data: times, gains between stages, checks, JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from knockon.bench.rollout.rank import RankFacts
from knockon.bench.rollout.settings import RolloutSettings
from knockon.bench.rollout.variants import BASE, HEADS, STAGES, Variant

# Each gain is from a stage to a later one, as the three-stage comparison is published.
GAINS = (("A", "B"), ("B", "C"), ("A", "C"))


@dataclass(frozen=True)
class Measurement:
    """One variant at one batch size.

    Attributes:
        rounds_ms: per rank, per round: mean milliseconds of a block.
        collectives: calls in one block, by name.
        collective_bytes: size of their results on one rank.
        extra_bytes: peak beyond weights, table and inputs, of the rank with the most; ``None`` on
            a CPU.
        traced_collectives: NCCL's kernels in a profile of one block; ``None`` without NCCL.
    """

    batch: int
    variant: Variant
    rounds_ms: tuple[tuple[float, ...], ...]
    collectives: Mapping[str, int]
    collective_bytes: Mapping[str, int]
    extra_bytes: int | None
    traced_collectives: int | None = None

    @property
    def slowest_rank(self) -> tuple[float, ...]:
        """Rounds of the rank with the highest median."""
        return max(self.rounds_ms, key=median)

    @property
    def ms(self) -> float:
        """Median over rounds, maximum over ranks."""
        return median(self.slowest_rank)


@dataclass(frozen=True)
class RolloutReport:
    """A whole run.

    Attributes:
        facts: of rank 0, in bytes.
        checked: proposal ids found equal, by comparison.
        environment: versions and hardware.
    """

    settings: RolloutSettings
    facts: RankFacts
    measurements: tuple[Measurement, ...]
    checked: Mapping[str, int]
    environment: Mapping[str, Any]

    def at(
        self, batch: int, stage: str, implementation: str, head: str = HEADS[0]
    ) -> Measurement | None:
        """The measurement of a stage; of base, whatever the implementation."""
        for found in self.measurements:
            v = found.variant
            same = v.stage == BASE or v.implementation == implementation
            if (found.batch, v.stage, v.head) == (batch, stage, head) and same:
                return found
        return None

    @property
    def kinds(self) -> tuple[tuple[str, str], ...]:
        """Implementations and LM heads that took part together, in order."""
        found = [(v.implementation, v.head) for v in self.settings.variants if v.proposes]
        return tuple(dict.fromkeys(found)) or ((self.implementations[0], HEADS[0]),)

    @property
    def implementations(self) -> tuple[str, ...]:
        """Those that took part, in order."""
        variants = self.settings.variants
        proposing = [v.implementation for v in variants if v.proposes]
        return tuple(dict.fromkeys(proposing or [v.implementation for v in variants]))

    @property
    def title(self) -> str:
        """Shape, ranks, precision and device; says so where it is a CPU."""
        s = self.settings
        ranks = f"TP{s.tp_size}" if s.one_rank_of is None else f"one rank of {s.one_rank_of}"
        return f"Domino rollout, {s.shape.name}, {ranks}, {s.dtype}, {self.facts.device}"

    @property
    def method(self) -> str:
        """How the times came about, and what they do not mean."""
        s = self.settings
        kind = "CUDA graph replays" if s.device == "cuda" else "eager calls, CPU"
        text = f"median of {s.rounds} x {s.replays} {kind}"
        if s.tp_size > 1:
            text += f", rank-maximum, collectives by {self.facts.collectives_by}"
        if s.one_rank_of is not None:
            text += (
                f"; one rank of {s.one_rank_of}, collectives replaced by local copies of the same "
                "size; tokens are not meaningful"
            )
        share = s.pool_size / s.shape.vocab_size
        if share > 0.1 and any(v.stage in "BC" for v in s.variants):
            text += f"; the pool is {share:.0%} of the vocabulary, so B and C save little over A"
        return text

    def gains(
        self, batch: int, implementation: str, head: str = HEADS[0]
    ) -> dict[str, float | None]:
        """Time saved from a stage to the next, in percent of the former; negative is slower."""
        found: dict[str, float | None] = {}
        for start, stop in GAINS:
            before = self.at(batch, start, implementation, head)
            after = self.at(batch, stop, implementation, head)
            gain = None if before is None or after is None else saved(before.ms, after.ms)
            found[f"{start} → {stop}"] = gain
        return found

    def beyond_base(self, measured: Measurement) -> float | None:
        """Milliseconds more than base in the same run, ``None`` where that was not asked for.

        Base is that of the run's own LM head, so a rollout with an FP8 head may come to less.
        """
        base = self.at(measured.batch, BASE, "")
        if base is None or not measured.variant.proposes:
            return None
        return measured.ms - base.ms

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain data; times in milliseconds, sizes in bytes."""
        s = self.settings
        settings = {
            name: getattr(s, name)
            for name in (
                *("device", "dtype", "tp_size", "one_rank_of", "batches", "pool_size", "steps"),
                *("rounds", "replays", "seed"),
            )
        }
        return {
            "benchmark": "rollout",
            "title": self.title,
            "method": self.method,
            "environment": dict(self.environment),
            "shape": asdict(s.shape),
            "settings": settings,
            "stages": {v.stage: STAGES[v.stage] for v in s.variants},
            "rank_0": asdict(self.facts),
            "proposals_found_equal": dict(self.checked),
            "results": [self._row(found) for found in self.measurements],
            "gains_percent": [
                {
                    "batch": batch,
                    "implementation": implementation,
                    **{
                        name: None if gain is None else round(gain, 2)
                        for name, gain in self.gains(batch, implementation).items()
                    },
                }
                for batch in s.batches
                for implementation in self.implementations
            ],
        }

    def _row(self, found: Measurement) -> dict[str, Any]:
        beyond = self.beyond_base(found)
        return {
            "batch": found.batch,
            "stage": found.variant.stage,
            "implementation": found.variant.implementation,
            "ms": round(found.ms, 5),
            "ms_min": round(min(found.slowest_rank), 5),
            "ms_max": round(max(found.slowest_rank), 5),
            "beyond_base_ms": None if beyond is None else round(beyond, 5),
            "rounds_ms_by_rank": [[round(ms, 5) for ms in rank] for rank in found.rounds_ms],
            "collectives": dict(found.collectives),
            "collective_bytes": dict(found.collective_bytes),
            "traced_collectives": found.traced_collectives,
            "extra_bytes": found.extra_bytes,
            "lm_head": found.variant.head,
        }


def saved(before: float, after: float) -> float:
    """How much less ``after`` is, in percent of ``before``."""
    return (before - after) / before * 100.0
