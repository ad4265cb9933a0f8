"""How often a rollout's chain is another than the specification's in FP64, and why.

The rollout is loaded as an engine loads it, from a published checkpoint; the specification is read
from the same files without it (:class:`FilesAsWritten`). Two readings are held against it. The
*contract* makes the roundings that the specification fixes (base logits to the head's dtype,
tabulated gates to the weights'): a right rollout equals it but for the order of its sums. The other
rounds nothing. After a block's first difference the chains have other prefixes and may differ
freely, so it is the first one that is explained.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from knockon.bench.first_difference import FirstDifference, Reading, explain
from knockon.drafters.domino import DominoDrafter
from knockon.drafters.load import load_drafter
from knockon.layers.attention import SdpaBackend, plan_block
from knockon.models.target import load_target
from knockon.parallel import SingleRank
from knockon.rollout.batched_reference import BatchedReference, input_gates
from knockon.rollout.gates import tabulate
from knockon.rollout.head import DominoHead
from knockon.rollout.layout import VocabLayout

BATCH = 32
MAX_POSITIONS = 64
CONTRACT, UNROUNDED = "contract", "unrounded"


class FilesAsWritten:
    """Target and drafter of a checkpoint as the specification names their parts, in FP64."""

    def __init__(self, target: Path, draft: Path, device: str = "cpu") -> None:
        config = json.loads((draft / "config.json").read_text())
        extra = config["dflash_config"]
        ours = load_file(draft / "model.safetensors", device)
        theirs = load_file(target / "model.safetensors", device)
        self.head = DominoHead(
            gru_input=ours["prefix_gru.weight_ih_l0"].double(),
            gru_state=ours["prefix_gru.weight_hh_l0"].double(),
            correction_in=ours["embed_proj.0.weight"].double(),
            correction_out=ours["embed_proj.2.weight"].double(),
            prefix_len=extra["pure_draft_prefix_len"],
            shift_label=extra["shift_label"],
        )
        self.embedding = theirs["model.embed_tokens.weight"].double()
        self.lm_head = theirs["lm_head.weight"].double()
        self.steps = config["block_size"] - 1

    def rows(self, z: Tensor) -> Tensor:
        """The rows of ``Z [B, L, H]`` that propose, ``[B, T, H]`` FP64."""
        offset = 0 if self.head.shift_label else 1
        return z[:, offset : offset + self.steps].double()

    def reference(self, dtype: torch.dtype | None) -> BatchedReference:
        """With input gates rounded to ``dtype``, or not at all."""
        return BatchedReference(self.head, input_gates(self.head, self.embedding, dtype))


class LoadedRollout:
    """The rollout of a checkpoint as an engine loads it, and the parts of it that round."""

    def __init__(
        self,
        target: Path,
        draft: Path,
        dtype: torch.dtype,
        pool_size: int,
        device: str = "cpu",
    ) -> None:
        self.dtype, self.pool_size = dtype, pool_size
        self.target = load_target(target, dtype, SingleRank(), device)
        self.target.pack()
        drafter = load_drafter(draft, self.target, SdpaBackend(), MAX_POSITIONS, pool_size)
        assert isinstance(drafter, DominoDrafter)
        self.drafter = drafter

    @property
    def implementation(self) -> str:
        """``"plain"`` or ``"fused"``."""
        return self.drafter.rollout.implementation

    def propose(self, z: Tensor, bonus: Tensor) -> Tensor:
        """``[B, T]``."""
        return self.drafter.rollout(z.to(self.dtype), bonus)

    def base_logits(self, rows: Tensor) -> Tensor:
        """``[B, T, V]`` in the head's dtype, the bits that the rollout has."""
        step_major = rows.transpose(0, 1).to(self.dtype)
        vocab = self.target.config.vocab_size
        local = self.target.lm_head.local(step_major.reshape(-1, rows.shape[-1]))[:, :vocab]
        return local.view(*step_major.shape[:2], vocab).transpose(0, 1)

    def gates(self) -> Tensor:
        """The table of input gates ``[V, 3G]``, the bits that the rollout has, in FP64."""
        layout = VocabLayout([self.target.vocab_shard], self.target.device)
        rows = self.target.embedding.weight[: self.target.config.vocab_size]
        return tabulate(self.drafter.rollout.head, rows, layout, SingleRank()).double()


def draft_blocks(target: Path, draft: Path, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """``Z [count, L, H]`` in BF16 and bonus tokens, drafted from random contexts in FP64."""
    loaded = LoadedRollout(target, draft, torch.float64, 0)
    drafter = loaded.drafter
    rng = torch.Generator().manual_seed(seed)
    vocab, hidden = loaded.target.config.vocab_size, loaded.target.config.hidden_size
    length, page = drafter.block_size, drafter.block_size
    drafter.bind_kv((2 * BATCH + 1) * page)
    blocks, bonuses = [], []
    for first in range(0, count, BATCH):
        batch = min(BATCH, count - first)
        table = torch.arange(1, 2 * batch + 1).view(batch, 2)
        starts = torch.zeros(batch, dtype=torch.int64)
        features = torch.randn(batch, length, hidden, generator=rng, dtype=torch.float64)
        context = torch.randint(0, vocab, (batch, length), generator=rng)
        drafter.observe(features, context, plan_block(table, page, starts, length, length))
        lengths = torch.randint(1, length + 1, (batch,), generator=rng)
        bonus = torch.randint(0, vocab, (batch,), generator=rng)
        plan = plan_block(table, page, lengths, length, 2 * length)
        blocks.append(drafter.backbone.draft(bonus, plan).to(torch.bfloat16))
        bonuses.append(bonus)
    return torch.cat(blocks), torch.cat(bonuses)


@dataclass
class Agreement:
    """One rollout against one reading.

    Attributes:
        reading: ``"contract"`` or ``"unrounded"``.
        implementation: of the rollout, ``"plain"`` or ``"fused"``.
        differing: proposals that differ, those after a first difference included.
        smallest_lead: the least lead of any token of the chains that were read.
        other_base_logits: base logits of the rollout that are not the reading's to the last bit.
    """

    dtype: torch.dtype
    pool_size: int
    reading: str
    implementation: str = "plain"
    blocks: int = 0
    proposals: int = 0
    differing: int = 0
    smallest_lead: float = math.inf
    other_base_logits: int = 0
    first_differences: list[FirstDifference] = field(default_factory=list)


def compare(
    files: FilesAsWritten,
    rollouts: Sequence[LoadedRollout],
    z: Tensor,
    bonus: Tensor,
    progress: Callable[[int], object] = lambda blocks: None,
) -> list[Agreement]:
    """Run all blocks through each rollout and its two readings.

    Args:
        rollouts: of the same files and pool size, one a dtype.
        progress: told the number of blocks after each batch.

    Returns:
        Two for each rollout, its contract first.
    """
    unrounded = files.reference(None)
    contracts = [files.reference(rollout.dtype) for rollout in rollouts]
    as_rolled = [BatchedReference(files.head, rollout.gates()) for rollout in rollouts]
    results = [
        [
            Agreement(rollout.dtype, rollout.pool_size, name, rollout.implementation)
            for name in (CONTRACT, UNROUNDED)
        ]
        for rollout in rollouts
    ]
    [pool_size] = {rollout.pool_size for rollout in rollouts}
    for start in range(0, len(bonus), BATCH):
        blocks, tokens = z[start : start + BATCH], bonus[start : start + BATCH]
        rows = files.rows(blocks)
        exact = rows @ files.lm_head.t()
        truth = unrounded.read(rows, tokens, exact, pool_size)
        for i, rollout in enumerate(rollouts):
            found = rollout.propose(blocks, tokens)
            rolled = rollout.base_logits(rows).double()
            base, contract = exact, truth
            if rollout.dtype != torch.float64:  # whose contract rounds nothing
                base = exact.to(rollout.dtype).double()
                contract = contracts[i].read(rows, tokens, base, pool_size)
            readings = ((contracts[i], base, contract), (unrounded, exact, truth))
            for agreement, (reference, logits, read) in zip(results[i], readings, strict=True):
                differs = found != read.tokens
                agreement.blocks += len(found)
                agreement.proposals += found.numel()
                agreement.differing += int(differs.sum())
                agreement.smallest_lead = min(agreement.smallest_lead, float(read.leads.min()))
                agreement.other_base_logits += int((rolled != logits).sum())
                agreement.first_differences += [
                    explain(
                        start + b,
                        rows[b],
                        tokens[b],
                        read.tokens[b],
                        found[b],
                        Reading(reference, logits[b]),
                        Reading(as_rolled[i], rolled[b]),
                        rollout.dtype,
                        pool_size,
                    )
                    for b in differs.any(1).nonzero().flatten().tolist()
                ]
        progress(len(blocks))
    return [agreement for pair in results for agreement in pair]
