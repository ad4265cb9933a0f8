"""One speculative step as the specification has it: draft, propose, verify, accept, commit.

Nothing here reads a value back to the host, so that the whole can be captured as one graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from knockon.drafters.base import Drafter
from knockon.engine.sampling import SamplingBatch, sample
from knockon.engine.state_memory import StateBudget
from knockon.engine.verify import Accepted, accept
from knockon.layers.attention import BlockPlan, plan_block
from knockon.layers.recurrent_state import DeltaMemory, StateRows
from knockon.models.decoder_layer import LayerMemory
from knockon.models.target import Target
from knockon.parallel import Group


@dataclass
class DecodeState:
    """The requests of a decode step, on the device.

    Attributes:
        page_table: ``[B, P]`` int64.
        lengths: ``[B]`` int64, ``n``: verified tokens whose KV is written.
        bonus: ``[B]`` int64, the token at position ``n``, chosen but not yet run.
        context: host-known bound on ``lengths``, ``None`` without one.
        first_slot: host-known start of a lone request's contiguous pages, else ``None``.
        slots: ``[B]`` int64, where recurrent layers keep the requests' states; ``None`` for a
            target without such layers.
    """

    page_table: Tensor
    lengths: Tensor
    bonus: Tensor
    context: int | None
    first_slot: int | None = None
    slots: Tensor | None = None

    def plan(self, rows: int, page_size: int) -> BlockPlan:
        """Rows at positions ``n .. n + rows - 1``."""
        return plan_block(
            self.page_table,
            page_size,
            self.lengths,
            rows,
            None if self.context is None else self.context + rows,
            first_slot=self.first_slot,
        )

    def verify_plan(self, width: int, page_size: int) -> BlockPlan:
        """The same, with states: held until it is known which rows stand, unless all must."""
        plan = self.plan(width, page_size)
        if self.slots is not None:
            plan.states = StateRows(self.slots, held=width > 1)
        return plan


Accept = Callable[[Tensor, Tensor, Tensor, SamplingBatch], Accepted]
"""``(proposals [B, w-1], drawn [B, w], positions [B, w] of the verified rows, sampling)``."""


def accept_drawn(
    proposals: Tensor, drawn: Tensor, positions: Tensor, sampling: SamplingBatch
) -> Accepted:
    """What the target drew too, and nothing else: :func:`~knockon.engine.verify.accept`.

    Of a request that is not to speculate no proposal is accepted, so it gains the target's token at
    its first row: what the target alone would give, whatever width its batch is verified at.
    """
    return accept(torch.where(sampling.speculates[:, None], proposals, -1), drawn)


@dataclass(frozen=True)
class Engines:
    """The target, the drafter (or none) and their KV, as a step uses them.

    Attributes:
        accept: decides what is accepted. Only a benchmark puts another in the default's place.
    """

    target: Target
    drafter: Drafter | None
    kv: list[LayerMemory]
    group: Group
    page_size: int
    accept: Accept = accept_drawn

    def allocate(self, num_pages: int, states: StateBudget | None = None) -> None:
        """Make target and draft KV of so many pages, the null page included, and states."""
        slots = num_pages * self.page_size
        self.kv.clear()  # before the new is made
        if states is None:
            self.kv[:] = self.target.allocate(slots)
        else:
            self.kv[:] = self.target.allocate(slots, states.states, states.dtype)
        if self.drafter is not None:
            self.drafter.bind_kv(slots)

    @property
    def states(self) -> list[DeltaMemory]:
        """States of every recurrent layer."""
        return [memory for memory in self.kv if isinstance(memory, DeltaMemory)]

    def copy_state(self, source: int, target: int) -> None:
        """What recurrent layers keep in one slot, to another."""
        for memory in self.states:
            memory.copy(source, target)


def untimed() -> None:
    """Marks the end of a part where nobody asks how long it took."""


def speculative_step(
    engines: Engines,
    state: DecodeState,
    sampling: SamplingBatch,
    width: int,
    part_ended: Callable[[], None] = untimed,
) -> tuple[Accepted, Tensor]:
    """Propose ``width - 1`` tokens per request, verify them and commit what the target agrees with.

    Args:
        width: the verify width ``w``; 1 decodes without speculation.
        part_ended: called on the host after each of :data:`~knockon.engine.part_times.PARTS`.

    Returns:
        What was accepted, and the target's logits ``[B, w, V]`` at the verified rows.
    """
    proposals = propose(engines, state, width - 1)
    part_ended()
    block = torch.cat([state.bonus.unsqueeze(1), proposals], dim=1)
    plan = state.verify_plan(width, engines.page_size)
    logits, features = verify(engines, block, plan)
    drawn = sample(logits, proposals, plan.positions + 1, sampling)
    accepted = engines.accept(proposals, drawn, plan.positions, sampling)
    accepted = agree(accepted, engines.group)
    part_ended()
    commit(engines, state, block, features, plan, accepted)
    part_ended()
    return accepted, logits


def propose(engines: Engines, state: DecodeState, steps: int) -> Tensor:
    """Draft one block and turn it into proposals ``[B, steps]``."""
    if steps == 0 or engines.drafter is None:
        return state.bonus.new_empty((state.bonus.shape[0], 0))
    plan = state.plan(engines.drafter.block_size, engines.page_size)
    return engines.drafter.propose(state.bonus, plan, steps)


def verify(engines: Engines, block: Tensor, plan: BlockPlan) -> tuple[Tensor, Tensor | None]:
    """Run ``[bonus, d_0 … d_{w-2}]`` through the target: logits ``[B, w, V]`` and features."""
    layers = engines.drafter.feature_layers if engines.drafter is not None else ()
    output = engines.target(block, plan, engines.kv, layers)
    return engines.target.logits(output.hidden), output.features


def agree(accepted: Accepted, group: Group) -> Accepted:
    """Take rank 0's word for what was accepted: no two ranks can ever decide differently."""
    if group.size == 1:
        return accepted
    packed = torch.cat([accepted.tokens, accepted.lengths.unsqueeze(1)], dim=1)
    group.broadcast(packed)
    # Every recurrent layer's kernel reads the lengths: laid out once for all of them.
    tokens, lengths = packed[:, :-1], packed[:, -1].contiguous()
    return Accepted(tokens, lengths, tokens.gather(1, lengths.unsqueeze(1) - 1).squeeze(1))


def commit(
    engines: Engines,
    state: DecodeState,
    block: Tensor,
    features: Tensor | None,
    plan: BlockPlan,
    accepted: Accepted,
) -> None:
    """Extend the verified length and the draft context; what was rejected lies beyond the length.

    Recurrent layers take the accepted rows in.
    Draft KV is written for every verified row, as the target's was: rows past the new length are
    overwritten by the next step before anything reads them.
    """
    if engines.drafter is not None and features is not None:
        engines.drafter.observe(features, block, plan)
    if plan.states is not None and plan.states.held:
        for memory in engines.states:
            memory.commit(accepted.lengths)
    state.lengths = state.lengths + accepted.lengths
    state.bonus = accepted.bonus
