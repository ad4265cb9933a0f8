"""Prompts through one gated delta net layer: PyTorch's chunks and flash-linear-attention's kernels.

    python benchmarks/linear_attention_prefill.py --json linear_attention_prefill.json [--tune]

A layer of Qwen3.6-27B's sizes with random weights takes in one prompt. Timed are the recurrence
alone and the whole layer (projections, convolution, recurrence, gated norm); a time is the median
of 5 rounds of eager calls in a row, as the engine prefills. The kernels' results are held to
PyTorch's in FP32 first. ``--tune`` also times them under the launch settings that the package
chooses for itself, and says which those are. Without the package PyTorch alone is timed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from knockon.bench.engine.shapes import CONFIGS
from knockon.bench.environment import environment
from knockon.bench.needs_gpu import needed_gpu
from knockon.bench.replay import median_us
from knockon.bench.whole_file import write_whole
from knockon.layers.attention import BlockPlan, plan_block
from knockon.layers.delta_rule import DeltaChunks, DeltaInputs, delta_chunks
from knockon.layers.fla_chunks import LAUNCHES, FlaChunks, fla_obstacle, settings_of, tuner_of
from knockon.layers.recurrent_state import StateRows
from knockon.models.config import ModelConfig, parse_hf
from knockon.models.gated_delta_net import GatedDeltaNet
from knockon.parallel import SingleRank

SHAPE = "qwen3.6-27b"
REPLAYS = 3


def make_layer(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> GatedDeltaNet:
    """A layer of random weights, whose decays are spread as trained ones are."""
    assert config.delta is not None
    with torch.device(device):
        layer = GatedDeltaNet(
            config.delta, config.hidden_size, config.rms_norm_eps, dtype, SingleRank()
        )
        for parameter in layer.parameters():
            parameter.normal_(0, 0.02)
        layer.norm.fill_(1)
        layer.conv.normal_(0, 0.3)
        layer.rate.copy_(-torch.empty_like(layer.rate).uniform_(0.1, 16))
        layer.dt_bias.fill_(-4)
    return layer


def make_inputs(
    layer: GatedDeltaNet, rows: int, device: torch.device
) -> tuple[DeltaInputs, Tensor]:
    """What the recurrence of one prompt reads, and a state."""
    config, rng = layer.config, torch.Generator(device).manual_seed(rows)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(1, rows, *shape, generator=rng, device=device)

    q, k = (
        torch.nn.functional.normalize(drawn(config.num_key_heads, config.key_dim), dim=-1)
        for _ in range(2)
    )
    values = config.num_value_heads
    inputs = DeltaInputs(
        q * config.key_dim**-0.5,
        k,
        drawn(values, config.value_dim),
        -0.1 * drawn(values).exp(),
        drawn(values).sigmoid(),
    )
    state = torch.randn(1, values, config.key_dim, config.value_dim, device=device, generator=rng)
    return inputs, state


def make_plan(rows: int, device: torch.device) -> BlockPlan:
    """One prompt from its first row on."""
    slots = torch.zeros(1, dtype=torch.int64, device=device)
    return plan_block(
        torch.ones((1, rows // 16 + 1), dtype=torch.int64, device=device),
        16,
        torch.zeros(1, dtype=torch.int64, device=device),
        rows,
        rows,
        states=StateRows(slots, may_begin=True),
    )


def error(found: Tensor, wanted: Tensor) -> float:
    """Root mean square of the difference over that of the values."""
    return float((found - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())


@contextmanager
def offered(configs: dict[str, Sequence[Any]]) -> Iterator[None]:
    """The package's own choice among all of its launch settings, for a while."""
    tuners = {name: tuner_of(module, name) for module, name, _ in LAUNCHES}
    settled = {name: tuner.configs for name, tuner in tuners.items() if tuner is not None}
    for name in settled:
        tuners[name].configs = configs[name]
    yield
    for name, before in settled.items():
        tuners[name].configs = before


def time_rows(
    layer: GatedDeltaNet, rows: int, ways: dict[str, DeltaChunks], device: torch.device
) -> dict[str, Any]:
    """Times of one prompt length, by way; the first is what the others are held to."""
    inputs, state = make_inputs(layer, rows, device)
    memory = layer.allocate(1, torch.float32, device)
    plan = make_plan(rows, device)
    hidden = torch.randn(1, rows, layer.projection.in_features, device=device).to(layer.dtype)
    wanted: tuple[Tensor, Tensor] | None = None
    result: dict[str, Any] = {"rows": rows}
    for name, chunks in ways.items():
        begun = time.perf_counter()
        found = chunks(inputs, state)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        first = time.perf_counter() - begun
        wanted = wanted or found
        errors = [error(x, y) for x, y in zip(found, wanted, strict=True)]
        if max(errors) > 0.02:
            raise SystemExit(f"{name} is off by {errors} at {rows} rows")
        layer.chunks = chunks
        result[name] = {
            "first_call_s": round(first, 3),
            "recurrence_us": median_us(lambda c=chunks: c(inputs, state), device, REPLAYS),
            "layer_us": median_us(lambda: layer(hidden, memory, plan), device, REPLAYS),
            "output_error": errors[0],
            "state_error": errors[1],
        }
        print(
            f"{rows:>6} {name:>10} {result[name]['recurrence_us'] / 1e3:>14.3f}"
            f" {result[name]['layer_us'] / 1e3:>10.3f} {max(errors):>10.1e} {first:>12.2f}",
            flush=True,
        )
    return result


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="file to write")
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 512, 2048, 4096])
    parser.add_argument("--shape", choices=[n for n in CONFIGS if "3.6" in n], default=SHAPE)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tune", action="store_true", help="also the package's own settings")
    args = parser.parse_args()
    torch.manual_seed(0)
    device = needed_gpu() if args.device == "cuda" else torch.device("cpu")
    dtype = torch.bfloat16
    config = parse_hf(CONFIGS[args.shape])
    layer = make_layer(config, dtype, device)
    ways: dict[str, DeltaChunks] = {"torch": delta_chunks}
    obstacle = fla_obstacle() if device.type == "cuda" else "its kernels run on CUDA GPUs"
    every: dict[str, Any] = {}
    if obstacle:
        print(f"torch alone: {obstacle}")
    else:
        found = {name: tuner_of(module, name) for module, name, _ in LAUNCHES}
        every = {name: tuner.configs for name, tuner in found.items() if tuner is not None}
        ways["fla"] = FlaChunks(dtype)
    print("milliseconds a call; error: root mean square, of outputs or state, whichever is larger")
    print(
        f"{'rows':>6} {'way':>10} {'recurrence':>14} {'layer':>10} {'error':>10} {'first, s':>12}"
    )
    record: dict[str, Any] = {
        "what": "one prompt through one gated delta net layer, by what takes prompts in",
        "environment": environment(),
        "shape": args.shape,
        "dtype": "bfloat16",
        "fla_obstacle": obstacle or None,
        "launches": {name: wanted for _, name, wanted in LAUNCHES},
        "prompts": [],
    }
    for rows in args.rows:
        record["prompts"].append(time_rows(layer, rows, ways, device))
        write_whole(args.json, json.dumps(record, indent=1) + "\n")
    if args.tune and every:
        with offered(every):
            tuned = [
                time_rows(layer, rows, {"torch": delta_chunks, "fla, tuned": ways["fla"]}, device)
                for rows in sorted(args.rows, reverse=True)  # it chooses on the first it meets
            ]
            chosen = {
                name: [settings_of(best) for best in tuner_of(module, name).cache.values()]
                for module, name, _ in LAUNCHES
                if name in every
            }
        print(json.dumps(chosen, indent=1))
        record |= {"tuned": tuned, "tuned_launches": chosen}
        write_whole(args.json, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
