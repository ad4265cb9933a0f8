"""Groups of ranks and what each of them holds."""

from knockon.parallel.group import Group, SingleRank, TorchGroup, gather_last
from knockon.parallel.shards import HeadShard, VocabShard, deal

__all__ = ["Group", "HeadShard", "SingleRank", "TorchGroup", "VocabShard", "deal", "gather_last"]
