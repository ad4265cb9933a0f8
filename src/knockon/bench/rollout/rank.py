"""What one rank does: build weights once, then capture, run and time variants batch by batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from knockon.bench.replay import Graphed, collective_kernels, mean_ms
from knockon.bench.rollout.groups import CountingGroup, OneRankOf
from knockon.bench.rollout.memory import CudaMeter, Meter, beyond
from knockon.bench.rollout.settings import RolloutSettings
from knockon.bench.rollout.variants import (
    Program,
    Variant,
    base_program,
    rollout_of,
    rollout_program,
)
from knockon.bench.rollout.weights import StaticInputs, random_weights
from knockon.parallel import Group, SingleRank, TorchGroup, VocabShard
from knockon.rollout import DominoRollout, FP8Head


@dataclass(frozen=True)
class RankFacts:
    """What a rank computes on and with, and what it holds, in bytes."""

    device: str
    collectives_by: str
    weight_bytes: int
    gate_table_bytes: int
    fp8_head_bytes: int = 0


@dataclass(frozen=True)
class Prepared:
    """A variant that is ready to be timed on one rank.

    Attributes:
        collectives: calls in one block, by name.
        collective_bytes: size of their results on this rank.
        extra_bytes: peak beyond weights, table and inputs in an eager call, ``None`` on a CPU.
        eager: tokens ``[inputs, B, steps]`` on the CPU, of ``base`` the best local ids.
        replayed: the same from graph replays, ``None`` where there is no graph.
        traced: NCCL's kernels in a profile of one replay, ``None`` without NCCL.
    """

    collectives: dict[str, int]
    collective_bytes: dict[str, int]
    extra_bytes: int | None
    eager: Tensor
    replayed: Tensor | None
    traced: int | None = None


class RolloutRank:
    """One rank's part of the benchmark. All ranks get the same calls in the same order.

    Args:
        group: the ranks, or their stand-in.
        device: where this rank computes.
    """

    def __init__(self, settings: RolloutSettings, group: Group, device: torch.device) -> None:
        self.settings = settings
        self.device = device
        self._group = CountingGroup(group)
        self._weights = random_weights(settings, group.rank, device)
        shape, ranks = settings.shape, settings.vocab_ranks
        self._rollout = DominoRollout(
            self._weights.head,
            self._weights.vocab_rows,
            self._weights.vocab_rows,
            self._weights.shard,
            self._group,
            pool_size=1,  # each variant shares this one's tables, with settings of its own
            exchange="full",
            gate_table=True,
            sharded_embedding=ranks > 1,
            # told, since a stand-in for absent ranks cannot tell
            shards=[VocabShard.deal(shape.vocab_size, ranks, r) for r in range(ranks)],
        )
        self._fp8_head: FP8Head | None = None
        if any(variant.head == "fp8" for variant in settings.variants):
            self._fp8_head = FP8Head(self._weights.vocab_rows)
        self._meter: Meter | None = CudaMeter(device) if device.type == "cuda" else None
        self._inputs: StaticInputs | None = None
        self._runs: list[Callable[[], Tensor]] = []

    def facts(self) -> RankFacts:
        """What this rank computes on, and what it holds."""
        head = self._weights.head
        tensors = (
            self._weights.vocab_rows,
            *(head.gru_input, head.gru_state, head.correction_in, head.correction_out),
        )
        on_gpu = self.device.type == "cuda"
        return RankFacts(
            device=torch.cuda.get_device_name(self.device) if on_gpu else "CPU",
            collectives_by=_carrier(self._group.inner, on_gpu),
            weight_bytes=sum(t.numel() * t.element_size() for t in tensors),
            gate_table_bytes=self._rollout.gate_table_bytes,
            fp8_head_bytes=self._fp8_head.num_bytes if self._fp8_head is not None else 0,
        )

    def open_batch(self, batch: int) -> None:
        """Drop what the batch before held, and make inputs for ``batch`` requests."""
        self._runs.clear()
        self._inputs = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self._inputs = StaticInputs(self.settings, batch, self.device)

    @torch.no_grad()
    def prepare(self, variant: Variant) -> Prepared:
        """Make a variant ready: count, measure its memory, capture it, run it on fresh inputs."""
        inputs = self._opened()
        inputs.fill(0)
        extra: int | None = None
        if self._meter is None:
            program = self._program(variant)
        else:
            program, extra = beyond(self._meter, lambda: self._program(variant))
        self._group.clear()
        program()
        collectives, sizes = dict(self._group.calls), dict(self._group.bytes)
        run = Graphed(program) if self.device.type == "cuda" else program
        eager, replayed = [], []
        for number in range(1, self.settings.check_inputs + 1):
            inputs.fill(number)
            eager.append(self._tokens(variant, program()))
            if run is not program:
                replayed.append(self._tokens(variant, run()))
        inputs.fill(0)
        self._runs.append(run)
        traced = None
        if self.device.type == "cuda" and isinstance(self._group.inner, TorchGroup):
            traced = collective_kernels(run, self.device)
        return Prepared(
            collectives,
            sizes,
            extra,
            torch.stack(eager),
            torch.stack(replayed) if replayed else None,
            traced,
        )

    @torch.no_grad()
    def time_round(self) -> list[float]:
        """Milliseconds a block of every prepared variant, in the order they were prepared."""
        times = []
        for run in self._runs:
            self._meet()
            times.append(mean_ms(run, self.settings.replays, self.device))
        return times

    def _program(self, variant: Variant) -> Program:
        settings, inputs = self.settings, self._opened()
        if not variant.proposes:
            fp8_head = self._fp8_head if variant.head == "fp8" else None
            return base_program(
                inputs.draft_hidden,
                fp8_head or self._weights.vocab_rows,
                settings.steps,
                shift_label=settings.shape.shift_label,
            )
        rollout = rollout_of(variant, self._rollout, settings.pool_size, self._fp8_head)
        return rollout_program(rollout, inputs.draft_hidden, inputs.bonus, settings.steps)

    def _tokens(self, variant: Variant, output: Tensor) -> Tensor:
        if variant.proposes:
            return output.cpu()
        best = output[:, : self._weights.shard.num_org or None].argmax(-1)
        return best.view(self.settings.steps, -1).t().cpu()

    def _opened(self) -> StaticInputs:
        assert self._inputs is not None, "open_batch comes first"
        return self._inputs

    def _meet(self) -> None:
        """Wait until every rank is here, so that none is timed while waiting for another."""
        self._group.inner.all_reduce(torch.zeros(1, device=self.device))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _carrier(group: Group, on_gpu: bool) -> str:
    if isinstance(group, OneRankOf):
        return "local copies of the same size"
    if group.size == 1:
        return "nothing to exchange"
    return "NCCL " + ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else "gloo"


def spawned_rank(
    rank: int, size: int, process_group: dist.ProcessGroup, settings: RolloutSettings
) -> RolloutRank:
    """The worker of a spawned process: rank ``r`` on CUDA device ``r``, or on the CPU."""
    device = torch.device("cuda", rank) if settings.device == "cuda" else torch.device("cpu")
    return RolloutRank(settings, TorchGroup(process_group), device)


def lone_rank(settings: RolloutSettings) -> RolloutRank:
    """The worker of a run in this process: the only rank, or one rank of several."""
    device = torch.device("cpu")
    if settings.device == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    group: Group = SingleRank()
    if settings.one_rank_of is not None:
        group = OneRankOf(settings.one_rank_of)
    return RolloutRank(settings, group, device)
