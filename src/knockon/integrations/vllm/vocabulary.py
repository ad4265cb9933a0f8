"""What a rank holds of vLLM's embedding and LM head, as Knockon's vocabulary shard."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from knockon.errors import Refused
from knockon.parallel import VocabShard


def unwrapped(layer: Any) -> Any:
    """The layer itself where LoRA wraps it: a drafter uses no adapter."""
    return getattr(layer, "base_layer", layer)


def vocab_shard(layer: Any, what: str, rank: int, size: int) -> VocabShard:
    """The shard of a ``VocabParallelEmbedding`` or ``ParallelLMHead``.

    vLLM pads the vocabulary, deals equal parts of it to the ranks, and appends added vocabulary.

    Args:
        what: the layer, for messages.

    Raises:
        Refused: added vocabulary, or no layer of vLLM's vocabulary-parallel kind.
    """
    indices = getattr(layer, "shard_indices", None)
    if indices is None:
        raise Refused(what, type(layer).__name__, "a vocabulary-parallel layer of vLLM's")
    added = layer.num_embeddings - layer.org_vocab_size
    if added:
        raise Refused(f"{what}: added vocabulary", added, "none")
    start, stop = indices.org_vocab_start_index, indices.org_vocab_end_index
    padded = layer.num_embeddings_per_partition
    return VocabShard(rank, size, layer.org_vocab_size, start, stop - start, padded)


def plain_weight(layer: Any, what: str) -> Tensor:
    """The layer's ``[num_padded, H]`` weight in a floating dtype.

    Raises:
        Refused: a quantised layer, which has none.
    """
    weight = getattr(layer, "weight", None)
    method = type(getattr(layer, "quant_method", None)).__name__
    floating = isinstance(weight, Tensor) and weight.dtype in _FLOATING
    if not floating or method != "UnquantizedEmbeddingMethod":
        dtype = getattr(weight, "dtype", None)
        raise Refused(f"{what} weight", f"{method}, {dtype}", "one that is not quantised")
    assert isinstance(weight, Tensor)
    return weight.detach()


_FLOATING = (torch.bfloat16, torch.float16, torch.float32)
