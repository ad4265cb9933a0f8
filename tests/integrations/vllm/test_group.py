"""vLLM's group under Knockon's protocol: its conventions, and two real ranks of vLLM's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from knockon.integrations.vllm.group import VllmGroup
from knockon.parallel import Group, SingleRank, VocabShard
from knockon.rollout import DominoHead, DominoRollout

V, H, G, E, BLOCK, BATCH = 331, 16, 8, 8, 8, 3
STAGES = ((0, "full"), (40, "full"), (40, "compact"), (300, "compact"))


class Pair:
    """Rank 1 of 2, whose other rank holds the same."""

    world_size, rank_in_group = 2, 1

    def __init__(self, in_place: bool) -> None:
        self.in_place = in_place

    def all_gather(self, input_, dim=-1):
        assert dim == 0
        rank_0 = (input_.view(torch.int64) * 10).view(input_.dtype)
        return torch.cat([rank_0, input_])

    def all_reduce(self, input_):
        return input_.mul_(11) if self.in_place else input_ * 11

    def broadcast(self, input_, src=0):
        assert src == 0
        return input_.mul_(10)


@pytest.mark.parametrize("in_place", [True, False])
def test_out_of_place_and_in_place_collectives_alike_keep_the_protocol(in_place):
    group = VllmGroup(Pair(in_place))
    assert isinstance(group, Group)
    assert (group.size, group.rank) == (2, 1)
    x = torch.arange(6).view(3, 2).t()  # not contiguous
    out = torch.empty(2, 2, 3, dtype=torch.int64)
    group.all_gather(out, x)
    assert out[0].equal(x * 10) and out[1].equal(x)
    y = torch.tensor([1.0, 2.0])
    group.all_reduce(y)
    assert y.tolist() == [11.0, 22.0]
    group.broadcast(y)
    assert y.tolist() == [110.0, 220.0]


def parts() -> tuple[DominoHead, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Head, embedding and LM head whose chains do not hang on the order of a sum, and a batch."""
    rng = torch.Generator().manual_seed(8)

    def integers(*shape: int, most: int = 3) -> torch.Tensor:
        return torch.randint(-most, most + 1, shape, generator=rng).float()

    # Gates saturate and SiLU is the identity or 0, so that every dtype and order gives the same.
    head = DominoHead(
        gru_input=integers(3 * G, H) * 2048,
        gru_state=integers(3 * G, G) * 0,
        correction_in=integers(E, H + G) * 1024,
        correction_out=integers(V, E) / 1024,
        prefix_len=1,
        shift_label=True,
    )
    embedding, lm_head = integers(V, H), integers(V, H)
    rows = integers(BATCH, BLOCK, H)
    return head, embedding, lm_head, rows, torch.tensor([0, 5, V - 1])


def single_rank_chains() -> list[Any]:
    head, embedding, lm_head, rows, bonus = parts()
    shard = VocabShard.deal(V, 1, 0)
    return [
        DominoRollout(head, embedding, lm_head, shard, SingleRank(), pool_size=pool)(
            rows, bonus
        ).tolist()
        for pool, _ in STAGES
    ]


def rank_program(rank: int, folder: str) -> None:
    """One process of two: vLLM's group and its own layers, weights dealt by its own loader."""
    from types import SimpleNamespace

    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed.parallel_state import (
        get_tp_group,
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    from knockon.integrations.vllm.choice import build_rollout, choose
    from knockon.integrations.vllm.settings import PluginSettings

    torch.set_num_threads(1)
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(2, rank, f"file://{folder}/meet", rank, backend="gloo")
        initialize_model_parallel(tensor_model_parallel_size=2)
        head, embedding, lm_head, rows, bonus = parts()
        model = SimpleNamespace(
            domino=SimpleNamespace(head=lambda: head),
            model=SimpleNamespace(embed_tokens=VocabParallelEmbedding(V, H)),
            lm_head=ParallelLMHead(V, H),
            logits_processor=SimpleNamespace(scale=1.0),
        )
        for layer, full in ((model.model.embed_tokens, embedding), (model.lm_head, lm_head)):
            layer.weight_loader(layer.weight, full)
            layer.quant_method.process_weights_after_loading(layer)
        ids = torch.ones(BATCH, BLOCK, dtype=torch.int64)
        ids[:, 0] = bonus
        found = []
        for pool, exchange in STAGES:
            settings = PluginSettings(pool_size=pool, exchange=exchange)
            rollout = build_rollout(model, get_tp_group(), settings)
            found.append(choose(rollout, rows.view(-1, H), ids.view(-1), BLOCK - 1).tolist())
            assert rollout.exchange_taken == exchange
        assert rollout.shard.num_padded == 192 and rollout.shard.num_org == (192, 139)[rank]
        torch.save(found, f"{folder}/rank{rank}.pt")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_of_vllm_choose_what_one_rank_does(tmp_path, monkeypatch):
    pytest.importorskip("vllm", reason="vLLM is not installed here (docs/vllm.md)")
    monkeypatch.setenv("VLLM_PLUGINS", "")
    monkeypatch.setenv("VLLM_DIST_IDENT", tmp_path.name)  # a worker of vLLM's sets it
    mp.spawn(rank_program, args=(str(tmp_path),), nprocs=2)
    wanted = single_rank_chains()
    for rank in range(2):
        assert torch.load(tmp_path / f"rank{rank}.pt") == wanted
    assert len({str(chains) for chains in wanted}) > 1
