"""Random weights and inputs: the same for every variant, every rank and every number of ranks."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from knockon.bench.rollout.settings import RolloutSettings
from knockon.parallel import VocabShard
from knockon.rollout import DominoHead

_CHUNK = 16384  # rows drawn from one seed, so that a rank draws only the chunks it holds


@dataclass(frozen=True)
class RankWeights:
    """One rank's share. ``vocab_rows [num_padded, H]`` is LM head and embedding in one.

    The embedding is read once, for the gate table, so nothing is timed that the tie would change,
    and ``V x H`` is held once.
    """

    head: DominoHead
    vocab_rows: Tensor
    shard: VocabShard


def random_weights(settings: RolloutSettings, rank: int, device: torch.device) -> RankWeights:
    """Weights that make chains lively: base logits, corrections and gates of about unit size.

    So base logits and corrections weigh alike in a choice, and no gate is stuck.
    """
    shape, dtype = settings.shape, settings.torch_dtype
    hidden, gru, width = shape.hidden_size, shape.gru_size, shape.correction_size

    def normal(name: str, rows: int, columns: int, scale: float) -> Tensor:
        generator = seeded(settings.seed, name, device)
        drawn = torch.randn(rows, columns, generator=generator, dtype=dtype, device=device)
        return drawn.mul_(scale)

    draft_half = normal("W1 draft", width, hidden, hidden**-0.5)
    state_half = normal("W1 state", width, gru, 2 * gru**-0.5)
    head = DominoHead(
        gru_input=normal("W_ih", 3 * gru, hidden, 1.0),
        gru_state=normal("W_hh", 3 * gru, gru, gru**-0.5),
        correction_in=torch.cat((draft_half, state_half), dim=1),
        correction_out=normal("W2", shape.vocab_size, width, (width / 2) ** -0.5),
        prefix_len=shape.prefix_len,
        shift_label=shape.shift_label,
    )
    shard = VocabShard.deal(shape.vocab_size, settings.vocab_ranks, rank)
    rows = torch.zeros(shard.num_padded, hidden, dtype=dtype, device=device)
    for number in range(shard.start // _CHUNK, -(-shard.stop // _CHUNK)):
        start = number * _CHUNK
        stop = min(start + _CHUNK, shape.vocab_size)
        chunk = normal(f"vocabulary {number}", stop - start, hidden, hidden**-0.5)
        low, high = max(start, shard.start), min(stop, shard.stop)
        rows[low - shard.start : high - shard.start] = chunk[low - start : high - start]
    return RankWeights(head, rows, shard)


class StaticInputs:
    """The buffers that programs and graphs read: ``draft_hidden [B, L, H]`` and ``bonus [B]``."""

    def __init__(self, settings: RolloutSettings, batch: int, device: torch.device) -> None:
        shape = settings.shape
        self._seed = settings.seed
        self._vocab_size = shape.vocab_size
        size = (batch, shape.block_size, shape.hidden_size)
        self.draft_hidden = torch.zeros(size, dtype=settings.torch_dtype, device=device)
        self.bonus = torch.zeros(batch, dtype=torch.int64, device=device)

    def fill(self, number: int) -> None:
        """Overwrite the buffers with random input ``number``, the same on every rank."""
        name = f"input {len(self.bonus)} {number}"
        generator = seeded(self._seed, name, self.bonus.device)
        self.draft_hidden.normal_(generator=generator)
        self.bonus.random_(0, self._vocab_size, generator=generator)


def seeded(seed: int, name: str, device: torch.device) -> torch.Generator:
    """A generator for the draws called ``name``, independent of what was drawn before."""
    return torch.Generator(device).manual_seed(random.Random(f"{seed} {name}").getrandbits(62))
