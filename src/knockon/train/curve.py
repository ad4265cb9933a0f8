"""The log of a training run, read back and drawn."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from knockon.errors import Refused

Line = dict[str, float]


def read_curve(log: Path) -> list[Line]:
    """The lines of a ``train.jsonl``; one that a kill has cut short is left out.

    Raises:
        Refused: no such file, or nothing in it.
    """
    if not log.exists():
        raise Refused("log", str(log), "a train.jsonl: run the stage train first")
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]
    if not lines:
        raise Refused("log", str(log), "at least one line")
    return lines


def plot_curve(curve: Sequence[Line], path: Path, mean: float | None = None) -> None:
    """Losses, and accept lengths, against the step.

    Args:
        mean: accept length on workloads, drawn as a line.

    Raises:
        Refused: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        hint = "pip install matplotlib"
        raise Refused("matplotlib", None, "the package, to draw with", hint) from None

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = [line["step"] for line in curve]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8))
    corrected = any(line["base"] != line["final"] for line in curve)
    left.plot(steps, [line["base"] for line in curve], label="base alone", color="#9aa5b1")
    if corrected:
        left.plot(steps, [line["final"] for line in curve], label="with the Domino head")
    left.set(xlabel="step", ylabel="cross-entropy, weighted", ylim=(0, None))
    left.legend(frameon=False)
    right.plot(steps, [line["forced_accept"] for line in curve], label="teacher-forced, training")
    replayed = [line for line in curve if "held_out_accept" in line]
    if replayed:
        right.plot(
            [line["step"] for line in replayed],
            [line["held_out_accept"] for line in replayed],
            marker="o",
            markersize=3,
            label="chained, held-out sequences",
        )
    if mean is not None:
        right.axhline(mean, color="#cf1124", linestyle="--", label=f"workloads: {mean:.2f}")
    right.set(xlabel="step", ylabel="accept length", ylim=(1, None))
    right.legend(frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
