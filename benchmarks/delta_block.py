"""A verified block through one gated delta net layer's recurrence, and its accepted rows' replay.

    python benchmarks/delta_block.py --json delta_block.json

Value heads, key heads and states of Qwen3.6-27B, FP32. Each way to cut states into programs
(``BLOCKS`` and ``REPLAYS``: columns and warps) is first held to the PyTorch twin, then timed for 1,
8 and 32 requests and 1, 8 and 16 rows; nine rows of 16 are replayed. A time is the median of 5
rounds of replays of a CUDA graph that goes through the layers one after the other, so that states
come from memory. ``memory_us`` is what reading the states once (replay: reading and writing) takes
at 4.1 TB/s.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from knockon.bench.kernel_times import error_of, report_kernels, time_of
from knockon.layers.delta_rule import DeltaInputs, delta_steps, replay
from knockon.layers.fused.delta_block import (
    REPLAYED,
    SLICE,
    Slice,
    delta_block_kernel,
    replay_block_kernel,
)

KEY_HEADS, VALUE_HEADS, DIM = 16, 48, 128
LAYERS = 24
REQUESTS = (1, 8, 32)
ROWS = (1, 8, 16)
ACCEPTED = 9
BLOCKS = [Slice(8, 1), Slice(16, 1), Slice(32, 1), Slice(16, 2), Slice(32, 2), Slice(32, 4)]
REPLAYS = [*BLOCKS[1:], Slice(64, 2), Slice(64, 4), Slice(128, 4), Slice(128, 8)]
CLOSE = 1e-4


def make_inputs(requests: int, rows: int, device: torch.device) -> DeltaInputs:
    """Of one layer: queries and keys of length one, decays and strengths as trained ones are."""

    def unit(x: Tensor) -> Tensor:
        return x / x.norm(dim=-1, keepdim=True)

    keys = (requests, rows, KEY_HEADS, DIM)
    heads = (requests, rows, VALUE_HEADS)
    return DeltaInputs(
        q=unit(torch.randn(keys, device=device)) * DIM**-0.5,
        k=unit(torch.randn(keys, device=device)),
        v=torch.randn(*heads, DIM, device=device),
        log_decay=-torch.rand(heads, device=device) * 0.3,
        beta=torch.rand(heads, device=device),
    )


def measure_blocks(requests: int, states: list[Tensor]) -> Iterator[dict[str, Any]]:
    """Blocks of every number of rows, by every slice."""
    device = states[0].device
    slots = torch.arange(requests, device=device)
    for rows in ROWS:
        inputs = make_inputs(requests, rows, device)
        wanted, _, _ = delta_steps(inputs, states[0].clone(), torch.float32)
        for held in BLOCKS:
            out, _ = delta_block_kernel(inputs, states[0], slots, write=False, held=held)
            error = error_of(out, wanted, CLOSE, f"a block by {held}")
            calls = [
                partial(delta_block_kernel, inputs, layer, slots, write=False, held=held)
                for layer in states
            ]
            yield {
                "part": "block",
                **held._asdict(),
                "chosen": held == SLICE,
                "requests": requests,
                "rows": rows,
                **time_of(calls, states[0].nbytes),
                "error": error,
            }


def measure_replays(requests: int, states: list[Tensor]) -> Iterator[dict[str, Any]]:
    """The accepted rows of the longest block, by every slice."""
    device = states[0].device
    slots = torch.arange(requests, device=device)
    inputs = make_inputs(requests, ROWS[-1], device)
    _, corrections = delta_block_kernel(inputs, states[0], slots, write=False)
    lengths = torch.full((requests,), ACCEPTED, device=device)
    block = (inputs.k, corrections, inputs.log_decay, lengths)
    for held in REPLAYS:
        found = states[0].clone()
        wanted = replay(states[0].clone(), *block, torch.float32)
        replay_block_kernel(found, slots, *block, held=held)
        error = error_of(found, wanted, CLOSE, f"a replay by {held}")
        calls = [partial(replay_block_kernel, layer, slots, *block, held=held) for layer in states]
        yield {
            "part": "replay",
            **held._asdict(),
            "chosen": held == REPLAYED,
            "requests": requests,
            "rows": ACCEPTED,
            **time_of(calls, 2 * states[0].nbytes),
            "error": error,
        }


def measure(device: torch.device) -> Iterator[dict[str, Any]]:
    """Blocks and replays for every number of requests."""
    for requests in REQUESTS:
        shape = (requests, VALUE_HEADS, DIM, DIM)
        states = [torch.randn(shape, device=device) * 0.1 for _ in range(LAYERS)]
        yield from measure_blocks(requests, states)
        yield from measure_replays(requests, states)


if __name__ == "__main__":
    sizes = {"key_heads": KEY_HEADS, "value_heads": VALUE_HEADS, "dim": DIM, "layers": LAYERS}
    report_kernels("delta_block", __doc__, sizes, measure)
