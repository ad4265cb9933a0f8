"""The rollout built over layers that look like vLLM's, held to the same rollout made by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from knockon.errors import Refused
from knockon.integrations.vllm.choice import build_rollout, choose, refuse_options
from knockon.integrations.vllm.settings import PluginSettings
from knockon.parallel import SingleRank, VocabShard
from knockon.rollout import DominoHead, DominoRollout, FP8Head

V, PADDED, H, G, E, BLOCK = 91, 128, 16, 8, 8, 6


class UnquantizedEmbeddingMethod:
    def apply(self, layer, x, bias=None):
        return torch.nn.functional.linear(x, layer.weight)


class Alone:
    """A group of one, as vLLM has it."""

    world_size, rank_in_group = 1, 0

    def all_gather(self, input_, dim=-1):
        return input_

    def all_reduce(self, input_):
        return input_

    def broadcast(self, input_, src=0):
        return input_


def layer(weight: torch.Tensor, **changed: object) -> SimpleNamespace:
    padded = torch.full((PADDED, H), 50.0)  # tempting to take
    padded[:V] = weight
    fields = {
        "shard_indices": SimpleNamespace(org_vocab_start_index=0, org_vocab_end_index=V),
        "num_embeddings": V,
        "org_vocab_size": V,
        "num_embeddings_per_partition": PADDED,
        "quant_method": UnquantizedEmbeddingMethod(),
        "weight": padded,
        "bias": None,
    }
    return SimpleNamespace(**(fields | changed))


def head(shift_label: bool = True) -> DominoHead:
    rng = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng)

    return DominoHead(
        random(3 * G, H), random(3 * G, G), random(E, H + G), random(V, E), 1, shift_label
    )


def drafter(domino: DominoHead, **changed: object) -> SimpleNamespace:
    rng = torch.Generator().manual_seed(4)
    embedding, lm_head = (torch.randn(V, H, generator=rng) for _ in range(2))
    model = SimpleNamespace(
        domino=SimpleNamespace(head=lambda: domino),
        model=SimpleNamespace(embed_tokens=layer(embedding)),
        lm_head=layer(lm_head),
        logits_processor=SimpleNamespace(scale=1.0),
    )
    for name, value in changed.items():
        setattr(model, name, value)
    return model


@pytest.mark.parametrize("shift_label", [True, False])
@pytest.mark.parametrize("draft_head", ["auto", "fp8"])
def test_the_tokens_are_those_of_the_rollout_made_by_hand(shift_label, draft_head):
    domino = head(shift_label)
    model = drafter(domino)
    settings = PluginSettings(pool_size=20, draft_head=draft_head)
    rollout = build_rollout(model, Alone(), settings)
    weight = torch.zeros(PADDED, H)
    weight[:V] = model.lm_head.weight[:V]
    by_hand = DominoRollout(
        domino,
        model.model.embed_tokens.weight[:V],
        FP8Head(weight) if draft_head == "fp8" else weight,
        VocabShard(0, 1, V, 0, V, PADDED),
        SingleRank(),
        pool_size=20,
    )
    rows = torch.randn(3 * BLOCK, H, generator=torch.Generator().manual_seed(5))
    bonus = torch.tensor([7, 90, 0])
    ids = torch.full((3, BLOCK), 1, dtype=torch.int32)
    ids[:, 0] = bonus
    tokens = choose(rollout, rows, ids.view(-1), BLOCK - 1)
    assert tokens.tolist() == by_hand(rows.view(3, BLOCK, H), bonus, BLOCK - 1).tolist()
    assert tokens.max() < V
    # Padding of a CUDA graph lies behind the rows that count.
    padded = torch.cat([rows, torch.full((2 * BLOCK, H), float("nan"))])
    assert choose(rollout, padded, ids.view(-1), BLOCK - 1).equal(tokens)


def test_settings_reach_the_rollout():
    settings = PluginSettings(pool_size=0, exchange="full", rollout="plain")
    rollout = build_rollout(drafter(head()), Alone(), settings)
    found = (rollout.pool_size, rollout.exchange, rollout.implementation)
    assert found == (0, "full", "plain")


def half_the_vocabulary() -> SimpleNamespace:
    indices = SimpleNamespace(org_vocab_start_index=0, org_vocab_end_index=40)
    return SimpleNamespace(embed_tokens=layer(torch.zeros(V, H), shard_indices=indices))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lm_head": layer(torch.zeros(V, H), bias=torch.zeros(V))}, "target lm_head: found 'a bi"),
        ({"logits_processor": SimpleNamespace(scale=0.5)}, "logit_scale: found 0.5"),
        ({"model": half_the_vocabulary()}, r"target embedding: ids held: found \(0, 40\)"),
        (
            {"model": SimpleNamespace(embed_tokens=layer(torch.zeros(V, H), quant_method=None))},
            "target embedding weight: .* not quantised",
        ),
    ],
)
def test_a_target_that_the_rollout_cannot_borrow_from_is_refused(changed, message):
    with pytest.raises(Refused, match=message):
        build_rollout(drafter(head(), **changed), Alone(), PluginSettings())


def test_an_fp8_copy_of_a_quantised_head_is_refused():
    quantised = layer(torch.zeros(V, H), quant_method=None)
    with pytest.raises(Refused, match=r"target lm_head weight: .* not quantised"):
        build_rollout(drafter(head(), lm_head=quantised), Alone(), PluginSettings(draft_head="fp8"))


def options(speculative: dict[str, object], parallel: dict[str, object]) -> SimpleNamespace:
    asked = {
        "draft_sample_method": "greedy",
        "use_local_argmax_reduction": False,
        "draft_tensor_parallel_size": 2,
    }
    ranks = {"tensor_parallel_size": 2, "pipeline_parallel_size": 1}
    return SimpleNamespace(
        speculative_config=SimpleNamespace(**(asked | speculative)),
        parallel_config=SimpleNamespace(**(ranks | parallel)),
    )


def test_the_usual_options_are_accepted():
    refuse_options(options({}, {}))
    refuse_options(options({"draft_tensor_parallel_size": None}, {}))


@pytest.mark.parametrize(
    ("speculative", "parallel", "field"),
    [
        ({"draft_sample_method": "probabilistic"}, {}, "draft_sample_method"),
        ({"use_local_argmax_reduction": True}, {}, "use_local_argmax_reduction"),
        ({"draft_tensor_parallel_size": 1}, {}, "draft_tensor_parallel_size"),
        ({}, {"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
    ],
)
def test_options_that_a_chain_cannot_serve_are_refused(speculative, parallel, field):
    with pytest.raises(Refused, match=f"{field}: found"):
        refuse_options(options(speculative, parallel))
