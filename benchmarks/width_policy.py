"""The adaptive verify width in simulation: each fixed width, auto and the oracle.

    python benchmarks/width_policy.py --out width_policy.json [--plot width_policy.png]
    python benchmarks/width_policy.py --replay trace.jsonl

No model runs: step times come from a table, accept lengths from rates by position and by kind of
request. --replay prints what auto would have chosen at each step of a recorded trace instead.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from knockon.bench.rollout.plot import check_plot
from knockon.bench.width_examples import DOMINO_CLASSES, a100_tp2, h200
from knockon.bench.width_simulator import BestKnown, Phase, StepTable, simulate
from knockon.bench.width_trace import read_trace, replay
from knockon.engine.width import AUTO_WIDTHS, AdaptiveWidth, FixedWidth, WidthPolicy
from knockon.errors import KnockonError

CONCURRENCIES = (1, 2, 4, 8, 16, 32)
ALTERNATING = "1 and 32 in turn"
TOKENS = 8000  # of a trace at concurrency 1; four times as many from concurrency 4 on
SEEDS = range(3)


def traces() -> dict[str, list[Phase]]:
    """Tokens made at one concurrency; and one that spends about equal time at 1 and at 32."""
    steady = {str(c): [Phase(c, TOKENS * min(c, 4))] for c in CONCURRENCIES}
    return steady | {ALTERNATING: [Phase(1, TOKENS // 4), Phase(32, 2 * TOKENS)] * 3}


def policies(table: StepTable) -> dict[str, WidthPolicy]:
    """Fresh ones; auto both with every time measured at start and with none."""
    seeds = {(b, w): table.seconds(b, w) for b in CONCURRENCIES for w in AUTO_WIDTHS}
    fixed: dict[str, WidthPolicy] = {str(width): FixedWidth(width) for width in AUTO_WIDTHS}
    return fixed | {
        "auto": AdaptiveWidth(AUTO_WIDTHS, CONCURRENCIES, seeds),
        "auto, unseeded": AdaptiveWidth(AUTO_WIDTHS, CONCURRENCIES),
        "oracle": BestKnown(AUTO_WIDTHS, table, DOMINO_CLASSES),
    }


def measure(table: StepTable) -> list[dict[str, Any]]:
    """A row a trace: tokens a second of each policy, mean over the seeds."""
    rows = []
    for trace, phases in traces().items():
        speeds: dict[str, list[float]] = {}
        widths: dict[int, int] = {}
        for seed in SEEDS:
            for name, policy in policies(table).items():
                run = simulate(policy, table, DOMINO_CLASSES, phases, seed=seed)
                speeds.setdefault(name, []).append(run.tokens_per_second)
                if name == "auto":
                    for width, steps in run.widths().items():
                        widths[width] = widths.get(width, 0) + steps
        means = {name: fmean(values) for name, values in speeds.items()}
        best = max(means[str(width)] for width in AUTO_WIDTHS)
        rows.append(
            {
                "concurrency": trace,
                "tokens_per_second": means,
                "auto_over_best_fixed": means["auto"] / best,
                "unseeded_over_best_fixed": means["auto, unseeded"] / best,
                "auto_steps_by_width": dict(sorted(widths.items())),
            }
        )
    return rows


def print_table(table: StepTable, rows: Sequence[dict[str, Any]]) -> None:
    print(f"\n{table.name}: tokens a second, simulated")
    names = list(rows[0]["tokens_per_second"])
    print(f"{'concurrency':>16}" + "".join(f"{n:>16}" for n in names) + f"{'auto / best':>14}")
    for row in rows:
        cells = "".join(f"{row['tokens_per_second'][n]:>16.0f}" for n in names)
        print(f"{row['concurrency']:>16}{cells}{row['auto_over_best_fixed']:>14.3f}")


def plot(results: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """A row a table: speed-up over width 1 by concurrency, and the alternating trace as bars."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = ["4", "8", "12", "16", "auto", "oracle"]
    colours = dict(zip(shown, plt.get_cmap("tab10").colors, strict=False))
    figure, panels = plt.subplots(len(results), 2, figsize=(11, 3.9 * len(results)), squeeze=False)
    for (title, rows), (lines, bars) in zip(results.items(), panels, strict=True):
        steady = [row for row in rows if row["concurrency"] != ALTERNATING]
        for name in shown:
            ratios = [r["tokens_per_second"][name] / r["tokens_per_second"]["1"] for r in steady]
            lines.plot(
                CONCURRENCIES,
                ratios,
                label=name if not name.isdigit() else f"width {name}",
                color=colours[name],
                linewidth=2.4 if name == "auto" else 1.2,
                linestyle="--" if name == "oracle" else "-",
                marker="o" if name == "auto" else None,
            )
        lines.set_xscale("log", base=2)
        lines.set_xticks(CONCURRENCIES, [str(c) for c in CONCURRENCIES])
        lines.set_xlabel("concurrency")
        lines.set_ylabel("speed-up over width 1")
        lines.set_title(title, fontsize=10)
        lines.legend(fontsize=8)
        [mixed] = [row for row in rows if row["concurrency"] == ALTERNATING]
        speeds = [mixed["tokens_per_second"][name] for name in shown]
        bars.bar_label(
            bars.bar(shown, speeds, color=[colours[name] for name in shown]), fmt="%.0f", fontsize=8
        )
        bars.set_title("concurrency 1 and 32 in turn: tokens a second", fontsize=10)
        for panel in (lines, bars):
            panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle("Simulated: published acceptance of six workloads, mixed", fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def print_replay(path: Path, lag: int) -> None:
    steps = read_trace(path)
    widest = max(step.width for step in steps)
    widths = tuple(sorted({*(w for w in AUTO_WIDTHS if w < widest), widest}))
    chosen = replay(steps, AdaptiveWidth(widths), lag)
    same = sum(step.width == width for step, width in zip(steps, chosen, strict=True))
    for number, (step, width) in enumerate(zip(steps, chosen, strict=True)):
        print(f"{number:>6} batch {step.batch:>4} ran {step.width:>3} auto {width:>3}")
    print(f"{same} of {len(steps)} steps at the width that auto chooses")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--out", type=Path, help="JSON file to write")
    asked.add_argument("--replay", type=Path, help="JSON lines of a trace")
    parser.add_argument("--lag", type=int, default=0, help="of a trace: steps that were in flight")
    parser.add_argument("--plot", type=Path, help="picture to write: .png, .svg or .pdf")
    args = parser.parse_args()
    if args.replay is not None:
        print_replay(args.replay, args.lag)
        return
    if args.plot is not None:
        check_plot(args.plot)
    results, tables = {}, (a100_tp2(), h200())
    for table in tables:
        results[table.name] = measure(table)
        print_table(table, results[table.name])
    record = {
        "kind": "simulation",
        "widths": AUTO_WIDTHS,
        "requests": {kind.name: kind.rates for kind in DOMINO_CLASSES},
        "step_seconds": {
            table.name: [
                {"batch": b, "width": w, "seconds": table.seconds(b, w)}
                for b in CONCURRENCIES
                for w in AUTO_WIDTHS
            ]
            for table in tables
        },
        "results": results,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    if args.plot is not None:
        plot(results, args.plot)


if __name__ == "__main__":
    try:
        main()
    except KnockonError as error:
        raise SystemExit(f"error: {error}") from None
