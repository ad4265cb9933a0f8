"""Which rank holds which ids, told among the ranks once, at construction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from zlib import crc32

import torch
from torch import Tensor

from knockon.errors import Refused
from knockon.parallel import Group, VocabShard


class VocabLayout:
    """Every rank's shard of one vocabulary, checked to cover it in rank order.

    Args:
        shards: one shard per rank, in rank order.
        device: where ids are looked up.

    Raises:
        Refused: shards that leave a gap, overlap, disagree on ``V`` or padding, or are unordered.
    """

    def __init__(self, shards: Sequence[VocabShard], device: torch.device) -> None:
        refuse_gaps(shards)
        self.shards = tuple(shards)
        self._starts = torch.tensor([s.start for s in shards], device=device)
        self._stops = torch.tensor([s.stop for s in shards], device=device)

    def locate(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The rank that holds each id, and the id's row in that rank's shard."""
        owner = torch.bucketize(ids, self._stops, right=True)
        return owner, ids - self._starts[owner]


def refuse_gaps(shards: Sequence[VocabShard]) -> None:
    """Check that ``shards``, at least one, cover one vocabulary in rank order.

    Raises:
        Refused: shards that leave a gap, overlap, disagree on ``V`` or padding, or are unordered.
    """
    first = shards[0]
    expected_start = 0
    for rank, shard in enumerate(shards):
        where = f"rank {rank}'s shard"
        found = (shard.rank, shard.size, shard.vocab_size, shard.num_padded)
        wanted = (rank, len(shards), first.vocab_size, first.num_padded)
        if found != wanted:
            names = "(rank, size, vocab_size, num_padded)"
            raise Refused(f"{where} {names}", found, f"{wanted}")
        if shard.start != expected_start:
            raise Refused(f"{where}.start", shard.start, f"{expected_start}")
        expected_start = shard.stop
    if expected_start != first.vocab_size:
        raise Refused(
            "ids held by all shards together",
            expected_start,
            f"vocab_size = {first.vocab_size}",
            "Added vocabulary outside the shards is not supported",
        )


def checksum(shards: Sequence[VocabShard]) -> int:
    """A number, not 0, that tells one list of shards from another."""
    return 1 + crc32(repr([astuple(shard) for shard in shards]).encode())


def agree(
    shard: VocabShard,
    group: Group,
    settings: Mapping[str, int],
    choices: Mapping[str, Sequence[object]],
    problem: Refused | None,
    device: torch.device,
) -> list[VocabShard]:
    """Tell all ranks this one's shard, settings and state of health; learn theirs.

    One collective, entered even by a rank that has already found a ``problem``, so that no other
    is left waiting for it.

    Args:
        settings: integers by name that must be equal on all ranks.
        choices: for a setting that is a place in a list, the list, so that a message can name it.
        problem: what this rank refuses, if anything. It is raised after the exchange.

    Returns:
        Every rank's shard, in rank order.

    Raises:
        Refused: this rank's ``problem``, another rank's, or settings that differ.
    """
    facts = [
        int(problem is None),
        shard.rank,
        shard.size,
        shard.vocab_size,
        shard.start,
        shard.num_org,
        shard.num_padded,
        *settings.values(),
    ]
    mine = torch.tensor(facts, dtype=torch.int64, device=device)
    everyone = mine.new_empty((group.size, len(facts)))
    group.all_gather(everyone, mine)
    if problem is not None:
        raise problem
    rows = everyone.tolist()
    for rank, row in enumerate(rows):
        if not row[0]:
            raise Refused(f"rank {rank}", "refused its inputs", "inputs that every rank accepts")
    for rank, row in enumerate(rows):
        for name, found, wanted in zip(settings, row[7:], rows[0][7:], strict=True):
            if found != wanted:
                field, named = f"{name} on rank {rank}", choices.get(name)
                if named is None:
                    raise Refused(field, found, f"{wanted}, as on rank 0")
                raise Refused(field, named[found], f"{named[wanted]}, as on rank 0")
    return [VocabShard(*row[1:7]) for row in rows]
