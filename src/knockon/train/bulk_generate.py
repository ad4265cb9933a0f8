"""Answers of a target to very many prompts, as fast as one GPU makes them.

A fixed number of slots, each with its own stretch of KV memory, decode in step; the step is one
CUDA graph. Every few steps the host looks which slots have finished, takes their tokens and hands
the slots new prompts with one batched prefill. It is no server: no pages, no streaming, no
fairness. What it shares with none it can do at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from knockon.errors import Refused
from knockon.train.decode_kernels import (
    add_rms_norm,
    decode_attention,
    rope_and_store,
    sample,
    silu_mul,
)
from knockon.train.frozen_target import FrozenTarget


@dataclass(frozen=True)
class Job:
    """One continuation wanted.

    Attributes:
        prompt: token ids, at least one.
        max_new: at most this many tokens are generated.
        temperature: 0 is greedy.
        kind: the caller's own label.
    """

    prompt: list[int]
    max_new: int
    temperature: float = 0.0
    kind: str = ""


@dataclass(frozen=True)
class Finished:
    """A job and its tokens, the stop token included; ``stopped`` tells whether there was one."""

    job: Job
    tokens: list[int]
    stopped: bool


NextJobs = Callable[[int], list[Job]]
OnFinished = Callable[[list[Finished]], None]


class BulkGenerator:
    """Static-batch decoding with slots refilled from a queue.

    Args:
        target: the model.
        slots: sequences decoded at once.
        max_prompt, max_new: bounds of every job; KV memory is reserved for their sum.
        stop_ids: tokens that end a sequence.
        min_p: cut-off of sampled jobs, see `decode_kernels.sample`.
        steps_per_look: decode steps between two looks by the host.
        seed: of all sampling.
    """

    def __init__(
        self,
        target: FrozenTarget,
        slots: int,
        max_prompt: int,
        max_new: int,
        stop_ids: tuple[int, ...],
        min_p: float = 0.02,
        steps_per_look: int = 8,
        seed: int = 0,
    ) -> None:
        if max_prompt + max_new > target.cos.shape[0]:
            raise Refused(
                "max_prompt + max_new", max_prompt + max_new, f"at most {target.cos.shape[0]}"
            )
        self.target = target
        self.slots, self.max_prompt, self.max_new = slots, max_prompt, max_new
        self.min_p = min_p
        self.steps_per_look = steps_per_look
        config, device = target.config, target.device
        capacity = -(-(max_prompt + max_new) // 64) * 64
        shape = (config.num_layers, slots, config.num_kv_heads, capacity, config.head_dim)
        self.cache = (
            torch.zeros(shape, device=device, dtype=target.dtype),
            torch.zeros(shape, device=device, dtype=target.dtype),
        )
        self.slot_offsets = torch.arange(slots, device=device) * (shape[2] * shape[3] * shape[4])

        def state(fill: int) -> Tensor:
            return torch.full((slots,), fill, dtype=torch.int64, device=device)

        self.tokens, self.lengths, self.counts, self.limits = state(0), state(0), state(0), state(1)
        self.active = torch.zeros(slots, dtype=torch.bool, device=device)
        self.temperature = torch.zeros(slots, dtype=torch.float32, device=device)
        self.out = torch.zeros(slots, max_new, dtype=torch.int32, device=device)
        self.stop_ids = torch.tensor(stop_ids, dtype=torch.int64, device=device)
        self.seed = torch.tensor(seed * 1_000_003 + 1, dtype=torch.int64, device=device)
        self.generated = torch.zeros((), dtype=torch.int64, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None

    @torch.inference_mode()
    def run(
        self, next_jobs: NextJobs, on_finished: OnFinished, deadline: float | None = None
    ) -> int:
        """Decodes until `next_jobs` gives nothing more and all slots are idle, or the deadline.

        Args:
            next_jobs: called with the number of free slots; returns at most that many jobs. An
                empty list is not the end while others still run: what they yield may bring new
                jobs.
            on_finished: called with what ended; at the deadline also with what did not, as far as
                it got. It runs while the device computes.
            deadline: in `time.monotonic` seconds.

        Returns:
            Tokens generated.

        Raises:
            Refused: a prompt that is empty or longer than `max_prompt`, or too many new tokens
                asked for.
        """
        running: dict[int, Job] = {}
        while True:
            done = self._collect(running, everything=False)
            late = deadline is not None and time.monotonic() >= deadline
            if late:
                done += self._collect(running, everything=True)
                self.active.zero_()
            else:
                # Steps first: the host prepares new prompts while the device decodes.
                if running:
                    for _ in range(self.steps_per_look):
                        self._step()
                free = [slot for slot in range(self.slots) if slot not in running]
                # A prefill of few rows costs nearly as much as one of many: small openings wait.
                if free and (len(free) * 16 >= self.slots or not running):
                    jobs = next_jobs(len(free))
                    if jobs:
                        self._admit(jobs, free[: len(jobs)])
                        running.update(zip(free, jobs, strict=False))
            if done:
                on_finished(done)
            if late or (not running and not done):
                return int(self.generated)

    def _collect(self, running: dict[int, Job], everything: bool) -> list[Finished]:
        """Takes the tokens of slots that ended (or of all of them) and frees those slots."""
        if not running:
            return []
        active = self.active.tolist()
        ended = [slot for slot in running if everything or not active[slot]]
        if not ended:
            return []
        index = torch.tensor(ended, device=self.target.device)
        counts = self.counts[index].tolist()
        rows = self.out[index].cpu().numpy()
        stops = set(self.stop_ids.tolist())
        found = []
        for row, slot, count in zip(rows, ended, counts, strict=True):
            tokens = row[:count].tolist()
            found.append(Finished(running.pop(slot), tokens, bool(tokens) and tokens[-1] in stops))
        return found

    def _admit(self, jobs: list[Job], free: list[int]) -> None:
        """Prefills all but the last token of each prompt; the next step takes the last one."""
        for job in jobs:
            if not 1 <= len(job.prompt) <= self.max_prompt:
                raise Refused("prompt length", len(job.prompt), f"1 to {self.max_prompt} tokens")
            if not 1 <= job.max_new <= self.max_new:
                raise Refused("max_new", job.max_new, f"1 to {self.max_new}")
        device = self.target.device
        lengths = [len(job.prompt) - 1 for job in jobs]
        for part, width in _by_width(lengths):
            padded = torch.zeros(len(part), width, dtype=torch.int64)
            for row, i in enumerate(part):
                padded[row, : lengths[i]] = torch.tensor(jobs[i].prompt[:-1], dtype=torch.int64)
            slots = torch.tensor([free[i] for i in part], device=device)
            self.target.forward(padded.to(device), cache=self.cache, slots=slots)

        def column(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        slots = column(free)
        self.tokens[slots] = column([job.prompt[-1] for job in jobs])
        self.lengths[slots] = column(lengths)
        self.counts[slots] = 0
        self.limits[slots] = column([job.max_new for job in jobs])
        self.temperature[slots] = torch.tensor(
            [job.temperature for job in jobs], dtype=torch.float32, device=device
        )
        self.active[slots] = True

    def _step(self) -> None:
        if not self.target.embedding.is_cuda:
            self._decode()
            return
        if self.graph is None:
            self.graph = self._capture()
        self.graph.replay()

    def _capture(self) -> torch.cuda.CUDAGraph:
        """Records one decode step. What the warm-up steps changed is put back."""
        state = [self.tokens, self.lengths, self.counts, self.active, self.seed, self.generated]
        before = [tensor.clone() for tensor in state]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._decode()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._decode()
        for tensor, value in zip(state, before, strict=True):
            tensor.copy_(value)
        return graph

    def _decode(self) -> None:
        """One token for every active slot. Idle slots compute too, at their own position 0."""
        target, config = self.target, self.target.config
        keys, values = self.cache
        head_stride = keys.shape[3] * keys.shape[4]
        offsets = self.slot_offsets + self.lengths * config.head_dim
        residual = F.embedding(self.tokens, target.embedding)
        update: Tensor | None = None
        for index, layer in enumerate(target.layers):
            x = add_rms_norm(update, residual, layer.input_norm, config.rms_norm_eps)
            query = rope_and_store(
                F.linear(x, layer.qkv), self.lengths, target.cos, target.sin, config.num_heads,
                keys[index], values[index], offsets, head_stride,
            )  # fmt: skip
            out = decode_attention(query, keys[index], values[index], self.lengths)
            x = add_rms_norm(
                F.linear(out, layer.output), residual, layer.post_norm, config.rms_norm_eps
            )
            update = F.linear(silu_mul(F.linear(x, layer.gate_up)), layer.down)
        hidden = add_rms_norm(update, residual, target.norm, config.rms_norm_eps)
        token = sample(F.linear(hidden, target.lm_head), self.temperature, self.min_p, self.seed)

        self.seed += 1
        active = self.active
        at = self.counts.clamp(max=self.max_new - 1)[:, None]
        kept = torch.where(active, token, self.out.gather(1, at)[:, 0].long())
        self.out.scatter_(1, at, kept[:, None].to(torch.int32))
        self.generated += active.sum()
        self.counts += active
        stop = (token[:, None] == self.stop_ids).any(1) | (self.counts >= self.limits)
        self.active &= ~stop
        self.lengths.copy_(torch.where(self.active, self.lengths + 1, 0))
        self.tokens.copy_(torch.where(self.active, token, self.tokens))


def _by_width(lengths: list[int], most: int = 256) -> Iterator[tuple[list[int], int]]:
    """Prompts of about the same length together: their numbers and their padded width."""

    def width(i: int) -> int:
        return -(-lengths[i] // 64) * 64

    for padded, members in groupby(sorted(range(len(lengths)), key=width), key=width):
        group = list(members)
        if padded > 0:
            for start in range(0, len(group), most):
                yield group[start : start + most], padded
