"""What stands before and behind one gated delta net layer's recurrence: inputs, gate and tails.

    python benchmarks/delta_inputs.py --json delta_inputs.json

Heads of Qwen3.6-27B, BF16, 1, 8 and 32 requests of 1, 8 and 16 rows. Every way to cut the
convolution's rows into programs (``STRIPS``: rows and heads) and the output's gate (``TOGETHER``:
heads) is first held to the PyTorch twin, then timed; so is the convolution's tail of blocks of
which nine rows, or all of fewer, stand. ``joined`` is the rows and those before them put into one
tensor, which the kernels do without. A time is the median of 5 rounds of replays of a CUDA graph
that goes through the layers one after the other, so that activations come from memory where all
layers' are larger than the cache. ``memory_us`` is what reading and writing takes at 4.1 TB/s.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from knockon.bench.kernel_times import error_of, report_kernels, time_of
from knockon.layers.fused.conv_tail import write_tail_kernel
from knockon.layers.fused.delta_inputs import (
    DeltaWeights,
    Strip,
    delta_inputs_kernel,
    delta_inputs_plain,
    strip_of,
)
from knockon.layers.fused.gated_norm import HEADS, gated_norm_kernel, gated_norm_plain
from knockon.layers.short_conv import ConvRows, inputs_before

KEY_HEADS, VALUE_HEADS, DIM, TAPS = 16, 48, 128, 4
CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * DIM
LAYERS = 24
REQUESTS = (1, 8, 32)
ROWS = (1, 8, 16)
STAND = 9
STRIPS = [Strip(rows, heads) for rows in (1, 2, 4, 8) for heads in (1, 2, 4, 8)]
TOGETHER = (1, 2, 4, 8, 16)
EPS = 1e-6
CLOSE = 1e-4  # of FP32 results
CLOSE_ROUNDED = 2.0**-7  # of BF16 results: a step


class Layer(NamedTuple):
    """What one layer reads: parts of its projection's output, its weights and slots."""

    conv: ConvRows
    z: Tensor
    b: Tensor
    a: Tensor
    weights: DeltaWeights
    out: Tensor
    norm: Tensor


def make_layer(requests: int, rows: int, device: torch.device) -> Layer:
    """Random activations, weights as small as trained ones."""
    widths = (CHANNELS, VALUE_HEADS * DIM, VALUE_HEADS, VALUE_HEADS)
    projected = torch.randn(requests, rows, sum(widths), device=device).bfloat16()
    mixed, z, b, a = projected.split_with_sizes(widths, -1)
    before = torch.randn(2 * requests, TAPS - 1, CHANNELS, device=device).bfloat16()
    weights = DeltaWeights(
        torch.randn(TAPS, CHANNELS, device=device) * TAPS**-0.5,
        -torch.rand(VALUE_HEADS, device=device),
        torch.randn(VALUE_HEADS, device=device),
        DIM,
        DIM,
    )
    slots = torch.randperm(2 * requests, device=device)[:requests]
    out = torch.randn(requests, rows, VALUE_HEADS, DIM, device=device)
    norm = torch.rand(DIM, device=device)
    return Layer(ConvRows(mixed, before, slots), z, b, a, weights, out, norm)


def measure_inputs(layers: list[Layer]) -> list[dict[str, Any]]:
    """The convolution and what follows it, by every strip; and the tensor that is not made."""
    first = layers[0]
    requests, rows, heads = first.b.shape
    wanted = delta_inputs_plain(first.conv, first.b, first.a, first.weights)
    joined = requests * (TAPS - 1 + rows) * CHANNELS * 2
    moved = joined + first.weights.conv.nbytes + first.a.nbytes + first.b.nbytes
    moved += sum(x.nbytes for x in wanted)
    found: list[dict[str, Any]] = [
        {
            "part": "joined",
            **time_of([partial(ConvRows.joined, layer.conv) for layer in layers], 2 * joined),
        }
    ]
    for strip in STRIPS:
        if strip.rows >= 2 * rows:
            continue
        got = delta_inputs_kernel(first.conv, first.b, first.a, first.weights, strip)
        errors = [
            error_of(ours, theirs, CLOSE, f"{strip}, {name}")
            for name, ours, theirs in zip(wanted._fields, got, wanted, strict=True)
        ]
        calls = [
            partial(delta_inputs_kernel, layer.conv, layer.b, layer.a, layer.weights, strip)
            for layer in layers
        ]
        chosen = strip == strip_of(requests, rows, 2 * KEY_HEADS + heads)
        times = time_of(calls, moved)
        found.append(
            {
                "part": "inputs",
                **strip._asdict(),
                "chosen": chosen,
                **times,
                "error": max(errors),
            }
        )
    return found


def measure_gate(layers: list[Layer]) -> list[dict[str, Any]]:
    """The output's norm and gate, by so many heads of a program."""
    first = layers[0]
    wanted = gated_norm_plain(first.out, first.z, first.norm, EPS)
    moved = first.out.nbytes + 2 * first.z.nbytes
    found = []
    for heads in TOGETHER:
        got = gated_norm_kernel(first.out, first.z, first.norm, EPS, heads)
        error = error_of(got, wanted, CLOSE_ROUNDED, f"gate, {heads} heads")
        calls = [
            partial(gated_norm_kernel, layer.out, layer.z, layer.norm, EPS, heads)
            for layer in layers
        ]
        times = time_of(calls, moved)
        found.append(
            {"part": "gate", "heads": heads, "chosen": heads == HEADS, **times, "error": error}
        )
    return found


def measure_tail(layers: list[Layer]) -> dict[str, Any]:
    """What the rows that stand leave for the next one."""
    first = layers[0].conv
    requests, rows, _ = first.rows.shape
    stand = torch.full((requests,), min(STAND, rows), device=first.rows.device)
    wanted = first.before.clone()
    wanted[first.slots] = inputs_before(first.joined(), stand, TAPS)
    write_tail_kernel(first, stand, first.slots)
    error = error_of(first.before, wanted, 1e-9, "tail")
    calls = [partial(write_tail_kernel, layer.conv, stand, layer.conv.slots) for layer in layers]
    moved = 2 * requests * (TAPS - 1) * CHANNELS * 2
    return {"part": "tail", **time_of(calls, moved), "error": error}


def measure(device: torch.device) -> Iterator[dict[str, Any]]:
    """All parts for every number of requests and of rows."""
    for requests in REQUESTS:
        for rows in ROWS:
            layers = [make_layer(requests, rows, device) for _ in range(LAYERS)]
            for found in (*measure_inputs(layers), *measure_gate(layers), measure_tail(layers)):
                yield {"requests": requests, "rows_each": rows, **found}


if __name__ == "__main__":
    sizes = {
        "key_heads": KEY_HEADS,
        "value_heads": VALUE_HEADS,
        "dim": DIM,
        "channels": CHANNELS,
        "layers": LAYERS,
    }
    report_kernels("delta_inputs", __doc__, sizes, measure)
