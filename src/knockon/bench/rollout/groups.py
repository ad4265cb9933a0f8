"""Groups for measuring: one that counts its collectives, one that stands in for absent ranks."""

from __future__ import annotations

from collections import Counter

from torch import Tensor

from knockon.errors import Refused
from knockon.parallel import Group


class CountingGroup:
    """Passes every collective on to ``inner`` and keeps count.

    Attributes:
        calls: collectives entered, by name.
        bytes: size of their results on this rank, by name.
    """

    def __init__(self, inner: Group) -> None:
        self.inner = inner
        self.size, self.rank = inner.size, inner.rank
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def clear(self) -> None:
        self.calls.clear()
        self.bytes.clear()

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        self._count("all_gather", out)
        self.inner.all_gather(out, x)

    def all_reduce(self, x: Tensor) -> None:
        self._count("all_reduce", x)
        self.inner.all_reduce(x)

    def broadcast(self, x: Tensor) -> None:
        self._count("broadcast", x)
        self.inner.broadcast(x)

    def _count(self, name: str, result: Tensor) -> None:
        self.calls[name] += 1
        self.bytes[name] += result.numel() * result.element_size()


class OneRankOf:
    """One rank of ``size`` without the others: every collective is a local copy of the same size.

    Shapes and bytes written are those of real work; contents are not, so neither are tokens.
    """

    def __init__(self, size: int, rank: int = 0) -> None:
        if not 0 <= rank < size:
            raise Refused("rank", rank, f"0 to {size - 1}")
        self.size, self.rank = size, rank

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        out.copy_(x.expand_as(out))

    def all_reduce(self, x: Tensor) -> None:
        x.clone()

    def broadcast(self, x: Tensor) -> None:
        x.clone()
