"""How a dimension, a vocabulary and attention heads are dealt out to ranks."""

from __future__ import annotations

from dataclasses import dataclass

from knockon.errors import Refused


def deal(n: int, size: int, rank: int) -> tuple[int, int]:
    """The contiguous share ``(start, count)`` of ``n`` things for ``rank`` of ``size``.

    Shares differ by at most one; the first ranks take the larger ones.
    """
    base, extra = divmod(n, size)
    return rank * base + min(rank, extra), base + (rank < extra)


@dataclass(frozen=True)
class VocabShard:
    """The rows of the vocabulary that one rank holds: ids ``[start, start + num_org)``.

    Attributes:
        rank: this rank. size: number of ranks. vocab_size: ``V``, without padding.
        start: first id held. num_org: ids held, 0 for an empty shard.
        num_padded: rows of the shard's tensor, equal on all ranks; those past ``num_org`` are
            padding.

    Raises:
        Refused: a field that is no int, or outside its range.
    """

    rank: int
    size: int
    vocab_size: int
    start: int
    num_org: int
    num_padded: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            _refuse_other_than_int(f"shard.{name}", value)
        if self.size < 1:
            raise Refused("shard.size", self.size, "at least 1")
        if not 0 <= self.rank < self.size:
            raise Refused("shard.rank", self.rank, f"0 to {self.size - 1}")
        if self.vocab_size < 1:
            raise Refused("shard.vocab_size", self.vocab_size, "at least 1")
        if self.num_org < 0 or self.num_org > self.num_padded:
            raise Refused("shard.num_org", self.num_org, f"0 to num_padded = {self.num_padded}")
        if not 0 <= self.start <= self.vocab_size - self.num_org:
            raise Refused(
                "shard.start",
                self.start,
                f"0 to vocab_size - num_org = {self.vocab_size - self.num_org}",
            )

    @property
    def stop(self) -> int:
        """One past the last id held."""
        return self.start + self.num_org

    @classmethod
    def deal(cls, vocab_size: int, size: int, rank: int) -> VocabShard:
        """Equal blocks of ``ceil(V / size)`` rows; the last ranks may hold fewer, or none.

        Raises:
            Refused: an argument that is no int, or outside its range.
        """
        for name, value in (("vocab_size", vocab_size), ("size", size), ("rank", rank)):
            _refuse_other_than_int(f"shard.{name}", value)
        if size < 1:
            raise Refused("shard.size", size, "at least 1")
        num_padded = -(-vocab_size // size)
        start = min(rank * num_padded, vocab_size)
        return cls(rank, size, vocab_size, start, min(num_padded, vocab_size - start), num_padded)


@dataclass(frozen=True)
class HeadShard:
    """The attention heads that one rank computes.

    Query heads ``[head_start, head_start + head_count)`` and the KV heads
    ``[kv_start, kv_start + kv_count)`` that they read. A rank holds whole KV groups, unevenly where
    needed; with fewer KV heads than ranks each KV head is replicated on ``size / num_kv_heads``
    ranks, which split its query heads evenly.
    """

    num_heads: int
    num_kv_heads: int
    head_start: int
    head_count: int
    kv_start: int
    kv_count: int

    @property
    def group(self) -> int:
        """Query heads per KV head on this rank."""
        return self.head_count // self.kv_count

    @classmethod
    def deal(cls, num_heads: int, num_kv_heads: int, size: int, rank: int) -> HeadShard:
        """Deal heads to ``rank`` of ``size``.

        Raises:
            Refused: query heads that are no multiple of the KV heads, or a number of ranks that
                can neither share whole KV groups nor replicate them evenly.
        """
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise Refused(
                "num_attention_heads",
                num_heads,
                f"a multiple of num_key_value_heads {num_kv_heads}",
            )
        group = num_heads // num_kv_heads
        if size <= num_kv_heads:
            start, count = deal(num_kv_heads, size, rank)
            return cls(num_heads, num_kv_heads, start * group, count * group, start, count)
        copies, rest = divmod(size, num_kv_heads)
        if rest or group % copies:
            usable = [n for n in range(1, num_heads + 1) if _can_deal(num_heads, num_kv_heads, n)]
            raise Refused(
                "tp_size",
                size,
                f"one of {usable} for {num_heads} heads in {num_kv_heads} KV groups",
            )
        kv, part = divmod(rank, copies)
        share = group // copies
        return cls(num_heads, num_kv_heads, kv * group + part * share, share, kv, 1)


def _can_deal(num_heads: int, num_kv_heads: int, size: int) -> bool:
    if size <= num_kv_heads:
        return True
    copies, rest = divmod(size, num_kv_heads)
    return rest == 0 and (num_heads // num_kv_heads) % copies == 0


def _refuse_other_than_int(field: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise Refused(field, value, "an int")
