from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from knockon.errors import Refused
from knockon.integrations.vllm.vocabulary import plain_weight, unwrapped, vocab_shard
from knockon.parallel import VocabShard


class UnquantizedEmbeddingMethod: ...


class MarlinLinearMethod: ...


def layer(**changed: object) -> SimpleNamespace:
    fields = {
        "shard_indices": SimpleNamespace(org_vocab_start_index=2528, org_vocab_end_index=5003),
        "num_embeddings": 5003,
        "org_vocab_size": 5003,
        "num_embeddings_per_partition": 2528,
        "quant_method": UnquantizedEmbeddingMethod(),
        "weight": torch.zeros(4, 2, dtype=torch.bfloat16),
    }
    return SimpleNamespace(**(fields | changed))


def test_the_last_ranks_padding_is_padding():
    shard = vocab_shard(layer(), "lm_head", rank=1, size=2)
    assert shard == VocabShard(1, 2, 5003, 2528, 2475, 2528)


def test_added_vocabulary_is_refused():
    with pytest.raises(Refused, match="lm_head: added vocabulary: found 16"):
        vocab_shard(layer(num_embeddings=5019), "lm_head", 1, 2)


def test_a_layer_of_another_kind_is_refused():
    with pytest.raises(Refused, match="lm_head: found 'Linear'"):
        vocab_shard(torch.nn.Linear(1, 1), "lm_head", 0, 1)


@pytest.mark.parametrize(
    "changed",
    [
        {"quant_method": MarlinLinearMethod()},
        {"weight": torch.zeros(4, 2, dtype=torch.int8)},
        {"weight": None},
    ],
)
def test_a_quantised_layer_has_no_plain_weight(changed):
    with pytest.raises(Refused, match=r"embedding weight: .* not quantised"):
        plain_weight(layer(**changed), "embedding")


def test_a_plain_weight_is_the_layers_own():
    plain = layer()
    assert plain_weight(plain, "embedding").data_ptr() == plain.weight.data_ptr()


def test_adapters_are_looked_through():
    plain = layer()
    assert unwrapped(SimpleNamespace(base_layer=plain)) is plain
    assert unwrapped(plain) is plain
