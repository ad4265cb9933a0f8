"""Blocks whose chains are exact in every dtype and every order of summation.

Base logits are small integers, so ties abound. Gates are odd multiples of 1024 (new gates also
0), hence saturate to exactly 0, 1 or -1; SiLU's input is a multiple of 1024, hence SiLU is 0 or
the identity; ``W2`` holds integers over 1024, so corrections are small integers again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from hypothesis import strategies as st
from torch import Tensor

from knockon.parallel import Group, VocabShard
from knockon.rollout import DominoHead, DominoRollout
from knockon.rollout.reference import reference_rollout

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
H, G, E = 4, 3, 3


@dataclass(frozen=True)
class ExactCase:
    """One block: head, embedding, planted base logits ``[B, steps, V]`` and the draft's rows."""

    head: DominoHead
    embedding: Tensor
    base: Tensor
    draft_hidden: Tensor
    bonus: Tensor
    steps: int

    @property
    def vocab_size(self) -> int:
        return self.head.vocab_size

    def lm_head(self, shard: VocabShard) -> Callable[[Tensor], Tensor]:
        """An LM head that returns the planted logits of ``shard``, its padding tempting to take."""
        step_major = self.base.transpose(0, 1)  # [T, B, V]
        local = step_major.new_full((*step_major.shape[:2], shard.num_padded), 999.0)
        local[..., : shard.num_org] = step_major[..., shard.start : shard.stop]
        return lambda x: local.reshape(len(x), shard.num_padded)

    def rollout(
        self, shard: VocabShard, group: Group, sharded_embedding: bool = False, **options: object
    ) -> DominoRollout:
        embedding = self.embedding
        if sharded_embedding:
            embedding = embedding.new_full((shard.num_padded, H), 77.0)
            embedding[: shard.num_org] = self.embedding[shard.start : shard.stop]
        return DominoRollout(
            self.head,
            embedding,
            self.lm_head(shard),
            shard,
            group,
            sharded_embedding=sharded_embedding,
            **options,
        )

    def propose(self, rollout: DominoRollout) -> list[list[int]]:
        return rollout(self.draft_hidden, self.bonus, self.steps).tolist()

    def oracle(self, pool_size: int, gate_table: bool = True) -> list[list[int]]:
        return reference_rollout(
            self.head,
            self.embedding,
            None,
            self.draft_hidden,
            self.bonus,
            self.steps,
            pool_size,
            base=self.base,
            gate_table=gate_table,
        ).tolist()


def exact_case(
    seed: int,
    vocab_size: int,
    batch: int,
    steps: int,
    prefix_len: int = 1,
    shift_label: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    specials: bool = False,
) -> ExactCase:
    """A random exact case. ``specials`` plants signed zeros, infinities and NaN in base logits."""
    rng = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=rng).double()

    gru_input = 2048 * integers(-1, 1, 3 * G, H)
    gru_input[:, 0] = 1024 * (2 * integers(0, 1, 3 * G) - 1)
    gru_input[2 * G :, 0] *= integers(0, 1, G)  # new gates may be 0
    embedding = integers(-1, 1, vocab_size, H)
    embedding[:, 0] = 2 * integers(0, 1, vocab_size) - 1  # odd, so gates never cancel
    head = DominoHead(
        gru_input=gru_input.to(dtype),
        gru_state=(2048 * integers(-1, 1, 3 * G, G)).to(dtype),
        correction_in=(1024 * integers(-1, 1, E, H + G)).to(dtype),
        correction_out=(integers(-1, 1, vocab_size, E) / 1024).to(dtype),
        prefix_len=prefix_len,
        shift_label=shift_label,
    )
    base = integers(-3, 3, batch, steps, vocab_size)
    if specials:
        signs = 2 * integers(0, 1, *base.shape) - 1
        base = torch.where(base == 0, 0.0 * signs, base)
        planted = torch.tensor([float("nan"), -float("nan"), float("inf"), -float("inf")])
        choice = torch.randint(0, 4, base.shape, generator=rng)
        share = torch.rand(batch, steps, 1, generator=rng) ** 2  # from none of a row to all of it
        where = torch.rand(base.shape, generator=rng) < share
        base = torch.where(where, planted.double()[choice], base)
    length = steps + (0 if shift_label else 1)
    return ExactCase(
        head=head,
        embedding=embedding.to(dtype),
        base=base.to(dtype),
        draft_hidden=integers(-2, 2, batch, length, H).to(dtype),
        bonus=torch.randint(0, vocab_size, (batch,), generator=rng),
        steps=steps,
    )


def drawn_case(data: st.DataObject, vocab_size: int) -> ExactCase:
    """A case whose every size and setting Hypothesis draws."""
    return exact_case(
        data.draw(st.integers(0, 2**20), "seed"),
        vocab_size,
        batch=data.draw(st.integers(0, 3), "B"),
        steps=data.draw(st.integers(0, 6), "steps"),
        prefix_len=data.draw(st.integers(0, 4), "p"),
        shift_label=data.draw(st.booleans(), "shift_label"),
        dtype=data.draw(st.sampled_from(DTYPES), "dtype"),
        specials=data.draw(st.booleans(), "specials"),
    )


def cut_shards(vocab_size: int, cuts: list[int], extra_padding: int = 0) -> list[VocabShard]:
    """Uneven shards between ``cuts`` (each a share of the vocabulary in permille; may coincide)."""
    bounds = [0, *sorted(c * vocab_size // 1000 for c in cuts), vocab_size]
    counts = [b - a for a, b in pairwise(bounds)]
    padded = max(counts) + extra_padding
    size = len(counts)
    return [
        VocabShard(rank, size, vocab_size, bounds[rank], counts[rank], padded)
        for rank in range(size)
    ]
