"""The Domino rollout, tensor-parallel, for any engine.

It needs three things: an embedding, this rank's LM-head shard, and a group of ranks.
"""

from knockon.parallel import SingleRank, TorchGroup, VocabShard
from knockon.rollout.domino import DominoRollout
from knockon.rollout.exchange import choose_exchange
from knockon.rollout.fp8_head import FP8Head
from knockon.rollout.head import DominoHead

__all__ = [
    "DominoHead",
    "DominoRollout",
    "FP8Head",
    "SingleRank",
    "TorchGroup",
    "VocabShard",
    "choose_exchange",
]
