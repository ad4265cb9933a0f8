"""Plots of the rollout's results beside each other, from the JSON files of its benchmarks.

    python benchmarks/plot_rollout.py [--results FOLDER]

Writes ``rollout_extra.png`` (batches, pools, shapes, and the FP8 head beside the run's own) and
``rollout_versions.png`` (what each version of the kernels took, and what was predicted before it).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

RESULTS = Path(__file__).parent / "results"
BATCHES = ("1", "8", "64")


def load(folder: Path, name: str) -> dict[str, Any]:
    """A result file."""
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return found


def times(result: dict[str, Any], stage: str, implementation: str, head: str) -> dict[int, float]:
    """Milliseconds by batch size."""
    return {
        row["batch"]: row["ms"]
        for row in result["results"]
        if (row["stage"], row["implementation"]) == (stage, implementation)
        and row.get("lm_head", "auto") == head
    }


def beyond(result: dict[str, Any]) -> dict[int, float]:
    """Milliseconds of the fused stage C beyond base."""
    base = times(result, "base", "plain", "auto")
    return {b: ms - base[b] for b, ms in times(result, "C", "fused", "auto").items()}


def plot_batches(axes: Axes, folder: Path) -> None:
    """Beyond base over the batch size."""
    taken = beyond(load(folder, "rollout_qwen3.6-27b_tp1"))
    taken |= beyond(load(folder, "rollout_extra_batches"))
    lines = {
        "Qwen3.6-27B, K = 2048": taken,
        "K = 1024": beyond(load(folder, "rollout_extra_pool_1024")),
        "K = 512": beyond(load(folder, "rollout_extra_pool_512")),
        "7 steps (width 8)": beyond(load(folder, "rollout_extra_steps_7")),
        "Qwen3-8B": beyond(load(folder, "rollout_extra_qwen3-8b")),
        "Qwen3.5-4B": beyond(load(folder, "rollout_extra_qwen3.5-4b")),
    }
    for label, line in lines.items():
        batches = sorted(line)
        axes.plot(batches, [line[b] for b in batches], "o-", label=label, markersize=4)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(taken), [str(b) for b in sorted(taken)])
    axes.set_xlabel("requests")
    axes.set_ylabel("ms beyond the LM head")
    axes.set_title("fused rollout, one H200")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7)


def plot_fp8(axes: Axes, folder: Path) -> None:
    """A whole rollout with either head beside the BF16 head alone."""
    result = load(folder, "rollout_extra_fp8_tp1")
    bars = {
        "BF16 head alone": times(result, "base", "plain", "auto"),
        "rollout, BF16 head": times(result, "C", "fused", "auto"),
        "FP8 head alone": times(result, "base", "plain", "fp8"),
        "rollout, FP8 head": times(result, "C", "fused", "fp8"),
    }
    batches = sorted(bars["BF16 head alone"])
    for i, (label, line) in enumerate(bars.items()):
        shares = [line[b] / bars["BF16 head alone"][b] for b in batches]
        places = [x + 0.2 * (i - 1.5) for x in range(len(batches))]
        drawn = axes.bar(places, shares, 0.19, label=label)
        axes.bar_label(drawn, [f"{line[b]:.2f}" for b in batches], fontsize=6)
    axes.set_xticks(range(len(batches)), [f"B = {b}" for b in batches])
    axes.set_ylabel("relative to the BF16 head (ms on the bars)")
    axes.set_title("FP8 draft head, one H200")
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.legend(fontsize=7, loc="lower right")


def plot_versions(folder: Path, file: Path) -> None:
    """Measured beside predicted, version by version."""
    panels = load(folder, "rollout_versions")["panels"]
    figure, rows = plt.subplots(len(panels), 3, figsize=(11, 3.1 * len(panels)), squeeze=False)
    for row, panel in zip(rows, panels, strict=True):
        for axes, batch in zip(row, BATCHES, strict=True):
            versions = [v for v in panel["versions"] if v["measured"].get(batch) is not None]
            for label, marker in (("predicted", "_"), ("measured", "o")):
                points = [
                    (i, version[label][batch])
                    for i, version in enumerate(versions)
                    if version[label].get(batch) is not None
                ]
                x, y = zip(*points, strict=True) if points else ((), ())
                axes.plot(x, y, marker, label=label, markersize=9 if marker == "_" else 5)
            names = [version["name"] for version in versions]
            axes.set_xticks(range(len(names)), names, fontsize=7, rotation=20, ha="right")
            axes.set_title(f"{panel['title']}, B = {batch}", fontsize=8)
            axes.set_ylabel(panel["unit"])
            axes.set_ylim(0, 1.1 * max(version["measured"][batch] for version in versions))
            axes.set_xlim(-0.5, len(versions) - 0.5)
    rows[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files")
    folder = parser.parse_args().results
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.6))
    plot_batches(left, folder)
    plot_fp8(right, folder)
    figure.tight_layout()
    figure.savefig(folder / "rollout_extra.png", dpi=110)
    plot_versions(folder, folder / "rollout_versions.png")


if __name__ == "__main__":
    main()
