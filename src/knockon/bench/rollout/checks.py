"""Proposals that must be equal, compared before anything is timed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from torch import Tensor

from knockon.bench.rollout.rank import Prepared
from knockon.bench.rollout.variants import Variant
from knockon.errors import KnockonError

GRAPH_IS_EAGER = "graph replay = eager"
RANKS_AGREE = "all ranks equal"
B_IS_C = "B = C"


class ProposalsDiffer(KnockonError, RuntimeError):
    """Two runs that must propose the same tokens did not; the message shows the first."""


def compare(what: str, names: tuple[str, str], left: Tensor, right: Tensor) -> int:
    """How many proposals were compared, ``[inputs, B, steps]`` each.

    Raises:
        ProposalsDiffer: not all are equal.
    """
    different = left != right
    if different.any():
        count = int(different.sum())
        place = [int(i) for i in different.nonzero()[0]]
        where = ", ".join(
            f"{n} {i}" for n, i in zip(("input", "request", "proposal"), place, strict=True)
        )
        found, other = (int(t[tuple(place)]) for t in (left, right))
        raise ProposalsDiffer(
            f"{what}: {names[0]} proposes {found}, {names[1]} {other} at {where}, "
            f"counted from 0; {count} of {different.numel()} proposals differ"
        )
    return left.numel()


def check_batch(
    batch: int, prepared: Mapping[Variant, Sequence[Prepared]], meaningful: bool
) -> Counter[str]:
    """Compare what the ranks (the inner sequence) proposed at one batch size.

    Args:
        meaningful: whether ranks exchange real contents, so that B must equal C.

    Returns:
        Proposal ids compared, by comparison.

    Raises:
        ProposalsDiffer: at the first difference.
    """
    checked: Counter[str] = Counter()
    for variant, ranks in prepared.items():
        what = f"batch {batch}, {variant.label}"
        for rank, on_rank in enumerate(ranks):
            if on_rank.replayed is None:
                continue
            count = compare(
                f"{what}, rank {rank}", ("graph", "eager"), on_rank.replayed, on_rank.eager
            )
            if variant.proposes:
                checked[GRAPH_IS_EAGER] += count
        if variant.proposes and len(ranks) > 1:
            for rank, on_rank in enumerate(ranks[1:], start=1):
                names = ("rank 0", f"rank {rank}")
                checked[RANKS_AGREE] += compare(what, names, ranks[0].eager, on_rank.eager)
    if meaningful:
        for b, ranks in prepared.items():
            c = Variant("C", b.implementation)
            if b.stage == "B" and c in prepared:
                names = (b.label, c.label)
                checked[B_IS_C] += compare(
                    f"batch {batch}", names, ranks[0].eager, prepared[c][0].eager
                )
    return checked
