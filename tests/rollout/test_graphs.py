"""A captured block replays to what the same block gives eagerly, on real shapes and new inputs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from knockon.bench.rollout.groups import OneRankOf
from knockon.parallel import SingleRank, VocabShard
from knockon.rollout import DominoHead, DominoRollout

pytestmark = pytest.mark.gpu

# Qwen3.6-27B.
V, H, G, E, L = 248_320, 5120, 1024, 256, 16


Weights = tuple[DominoHead, torch.Tensor, torch.Tensor]


def normal(rng: torch.Generator, scale: float, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(0, scale, generator=rng)


@pytest.fixture(scope="module")
def weights() -> Weights:
    rng = torch.Generator("cuda").manual_seed(0)
    head = DominoHead(
        normal(rng, H**-0.5, 3 * G, H),
        normal(rng, 2 * G**-0.5, 3 * G, G),
        normal(rng, G**-0.5, E, H + G),
        normal(rng, E**-0.5, V, E),
    )
    return head, normal(rng, 1.0, V, H), normal(rng, 2 * H**-0.5, V, H)


def block(rng: torch.Generator, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    bonus = torch.randint(0, V, (batch,), device="cuda", generator=rng)
    return normal(rng, 1.0, batch, L, H), bonus


def captured(run: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph, out


@pytest.mark.parametrize("batch", (1, 8, 64))
@pytest.mark.parametrize(
    ("size", "pool_size", "exchange"),
    ((1, 2048, "auto"), (1, 0, "auto"), (1, 2048, "compact"), (2, 2048, "compact"), (2, 0, "auto")),
)
@pytest.mark.parametrize("implementation", ("plain", "auto"))
def test_a_replayed_block_is_the_eager_one(
    weights: Weights, batch: int, size: int, pool_size: int, exchange: str, implementation: str
) -> None:
    head, embedding, lm_head = weights
    shards = [VocabShard.deal(V, size, rank) for rank in range(size)]
    rollout = DominoRollout(
        head,
        embedding,
        lm_head[: shards[0].num_padded],
        shards[0],
        SingleRank() if size == 1 else OneRankOf(size),
        pool_size,
        exchange,
        shards=shards,
        implementation=implementation,
    )
    rng = torch.Generator("cuda").manual_seed(batch)
    hidden, bonus = block(rng, batch)
    graph, replayed = captured(lambda: rollout(hidden, bonus, in_graph=True))
    checked = 0
    while checked < 1095:
        new_hidden, new_bonus = block(rng, batch)
        hidden.copy_(new_hidden)
        bonus.copy_(new_bonus)
        graph.replay()
        eager = rollout(new_hidden, new_bonus, in_graph=True)
        assert torch.equal(replayed, eager)
        assert ((eager >= 0) & (eager < V)).all()
        checked += eager.numel()
    assert rollout.nan_rows.item() == 0


@pytest.mark.parametrize("batch", (1, 2, 3, 12, 24, 64, 100, 130))
def test_the_kernels_give_the_plain_chains_over_thousands_of_replays(
    weights: Weights, batch: int
) -> None:
    head, embedding, lm_head = weights
    shard = VocabShard.deal(V, 1, 0)
    fused = DominoRollout(head, embedding, lm_head, shard, SingleRank(), 2048)
    assert fused.implementation == "fused"
    plain = fused.with_settings(2048, implementation="plain")
    rng = torch.Generator("cuda").manual_seed(batch)
    hidden, bonus = block(rng, batch)
    graph, replayed = captured(lambda: fused(hidden, bonus, in_graph=True))
    blocks = differing = 0
    for _ in range(100 if batch < 64 else 50):
        new_hidden, new_bonus = block(rng, batch)
        hidden.copy_(new_hidden)
        bonus.copy_(new_bonus)
        for _ in range(3):
            graph.replay()
        differing += int((replayed != plain(new_hidden, new_bonus)).any(1).sum())
        blocks += batch
    # A near-tie may fall otherwise; on these inputs a few in ten thousand would.
    assert differing <= 1 + blocks // 1000


def test_a_large_block_needs_less_than_a_gibibyte_beyond_its_logits(weights: Weights) -> None:
    head, embedding, lm_head = weights
    shard = VocabShard.deal(V, 1, 0)
    logits = torch.empty((L - 1) * 64, V, dtype=torch.bfloat16, device="cuda")

    def into_logits(x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, lm_head.t(), out=logits)

    rollout = DominoRollout(head, embedding, into_logits, shard, SingleRank(), 2048)
    hidden, bonus = block(torch.Generator("cuda").manual_seed(0), 64)
    rollout(hidden, bonus)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    rollout(hidden, bonus)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 1 << 30
