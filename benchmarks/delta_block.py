"""A verified block through one gated delta net layer's recurrence, and its accepted rows' replay.

    python benchmarks/delta_block.py --json delta_block.json

Value heads, key heads and states of Qwen3.6-27B, FP32. Each way to cut states into programs
(``SLICES``: columns and warps) is first held to the PyTorch twin, then timed for 1, 8 and 32
requests and 1, 8 and 16 rows; nine rows of 16 are replayed. A time is the median of 5 rounds of
replays of a CUDA graph that goes through the layers one after the other, so that states come from
memory. ``memory_us`` is what reading the states once (replay: reading and writing) takes at
4.1 TB/s.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from knockon.bench.environment import environment
from knockon.bench.replay import replay_us
from knockon.bench.whole_file import write_whole
from knockon.layers.delta_rule import DeltaInputs, delta_steps
from knockon.layers.fused.delta_block import (
    SLICE,
    Slice,
    delta_block_kernel,
    replay_block_kernel,
)

KEY_HEADS, VALUE_HEADS, DIM = 16, 48, 128
LAYERS = 24
REQUESTS = (1, 8, 32)
ROWS = (1, 8, 16)
REPLAYED = 9
SLICES = [Slice(8, 1), Slice(16, 1), Slice(32, 1), Slice(16, 2), Slice(32, 2), Slice(32, 4)]
BYTES_PER_US = 4.1e6
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


def error_of(held: Slice, inputs: DeltaInputs, states: Tensor, slots: Tensor) -> float:
    """Largest difference of outputs to the twin's over the largest output."""
    wanted, _, _ = delta_steps(inputs, states[slots], torch.float32)
    found, _ = delta_block_kernel(inputs, states, slots, write=False, held=held)
    error = ((found - wanted).abs().max() / wanted.abs().max()).item()
    if not error < CLOSE:
        raise SystemExit(f"{held}: outputs differ from the twin's by {error:.1e} of the largest")
    return error


def measure(held: Slice, requests: int, states: list[Tensor]) -> list[dict[str, Any]]:
    """Times of one layer, for every number of rows."""
    device = states[0].device
    slots = torch.arange(requests, device=device)
    memory = requests * states[0][0].numel() * 4 / BYTES_PER_US
    found = []
    for rows in ROWS:
        inputs = make_inputs(requests, rows, device)
        error = error_of(held, inputs, states[0], slots)
        calls = [
            partial(delta_block_kernel, inputs, layer, slots, write=False, held=held)
            for layer in states
        ]
        found.append(
            {
                "values": held.values,
                "warps": held.warps,
                "requests": requests,
                "rows": rows,
                "block_us": round(replay_us(calls), 2),
                "memory_us": round(memory, 2),
                "error": error,
            }
        )
    _, corrections = delta_block_kernel(inputs, states[0], slots, write=False, held=held)
    lengths = torch.full((requests,), REPLAYED, device=device)
    block = (slots, inputs.k, corrections, inputs.log_decay, lengths)
    calls = [partial(replay_block_kernel, layer, *block, held=held) for layer in states]
    found[-1] |= {
        "replay_us": round(replay_us(calls), 2),
        "replay_memory_us": round(2 * memory, 2),
    }
    return found


def main() -> None:
    """Measure, print a line for each, and write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, help="where results go")
    path = parser.parse_args().json
    device = torch.device("cuda")
    torch.manual_seed(0)
    results = []
    for requests in REQUESTS:
        shape = (requests, VALUE_HEADS, DIM, DIM)
        states = [torch.randn(shape, device=device) * 0.1 for _ in range(LAYERS)]
        for held in SLICES:
            for result in measure(held, requests, states):
                results.append(result)
                print("  ".join(f"{name} {value:g}" for name, value in result.items()), flush=True)
    report = {
        "benchmark": "delta_block",
        "shape": {"key_heads": KEY_HEADS, "value_heads": VALUE_HEADS, "dim": DIM, "layers": LAYERS},
        "chosen": SLICE._asdict(),
        "environment": environment(),
        "results": results,
    }
    write_whole(path, json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
