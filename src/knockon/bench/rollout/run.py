"""The run: for every batch size, make all variants ready, hold them together, time them in turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from knockon.bench.environment import environment
from knockon.bench.rollout.checks import check_batch
from knockon.bench.rollout.rank import Prepared, RankFacts
from knockon.bench.rollout.ranks import Ranks
from knockon.bench.rollout.report import Measurement, RolloutReport
from knockon.bench.rollout.settings import RolloutSettings
from knockon.bench.rollout.variants import Variant

Progress = Callable[[str], None]


def measure(
    settings: RolloutSettings,
    ranks: Ranks,
    doing: Progress = lambda text: None,
    done: Progress = lambda text: None,
) -> RolloutReport:
    """Carry out a run on ranks that hold its workers.

    A round times every variant once, so that a drift of the machine's clocks falls on all alike.

    Args:
        doing: told what is under way.
        done: told a line for each variant and batch size.

    Raises:
        ProposalsDiffer: variants, ranks, or graph and eager do not propose alike.
        RankFailed: a rank died.
    """
    facts: RankFacts = ranks.call_all("facts")[0]
    checked: Counter[str] = Counter()
    measurements: list[Measurement] = []
    for batch in settings.batches:
        ranks.call_all("open_batch", batch)
        prepared: dict[Variant, list[Prepared]] = {}
        for variant in settings.variants:
            doing(f"batch {batch}, {variant.label}: preparing and checking")
            prepared[variant] = ranks.call_all("prepare", variant)
        checked += check_batch(batch, prepared, meaningful=settings.one_rank_of is None)
        rounds = []
        for number in range(settings.rounds):
            doing(f"batch {batch}: round {number + 1} of {settings.rounds}")
            rounds.append(ranks.call_all("time_round"))
        for column, (variant, of_ranks) in enumerate(prepared.items()):
            extras = [p.extra_bytes for p in of_ranks if p.extra_bytes is not None]
            found = Measurement(
                batch,
                variant,
                tuple(
                    tuple(times[rank][column] for times in rounds) for rank in range(len(of_ranks))
                ),
                of_ranks[0].collectives,
                of_ranks[0].collective_bytes,
                max(extras, default=None),
                of_ranks[0].traced,
            )
            measurements.append(found)
            done(progress_line(found))
    return RolloutReport(settings, facts, tuple(measurements), checked, environment())


def progress_line(found: Measurement) -> str:
    """One line on one variant at one batch size."""
    calls = sum(found.collectives.values())
    return (
        f"batch {found.batch:>3}  {found.variant.label:<11} {found.ms:8.3f} ms "
        f"({min(found.slowest_rank):.3f} to {max(found.slowest_rank):.3f}), "
        f"{calls} collective{'' if calls == 1 else 's'}"
    )
