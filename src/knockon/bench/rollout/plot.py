"""A report as a picture: a panel a batch size, a bar a variant, base marked in each bar."""

from __future__ import annotations

import importlib.util
import textwrap
from pathlib import Path

from knockon.bench.rollout.report import RolloutReport
from knockon.bench.rollout.variants import BASE
from knockon.errors import Refused

SUFFIXES = (".png", ".svg", ".pdf")
_BASE_COLOUR = "#9aa5b1"
_COLOURS = ("#2680c2", "#e0812b", "#3f9142", "#7a4fb5")


def check_plot(path: Path) -> None:
    """Find out before the run whether a plot can be written.

    Raises:
        Refused: another suffix than a picture's, or no matplotlib.
    """
    if path.suffix not in SUFFIXES:
        raise Refused("plot", str(path), f"a file name ending in {', '.join(SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise Refused("plot", str(path), "matplotlib (pip install matplotlib)")


def write_plot(report: RolloutReport, path: Path) -> None:
    """Draw the report. Panels have scales of their own, since batch sizes differ by far."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    batches = report.settings.batches
    labels = [variant.label for variant in report.settings.variants]
    width = max(6.5, len(batches) * (1.2 + 0.5 * len(labels)))
    figure, panels = plt.subplots(1, len(batches), figsize=(width, 4.2), squeeze=False)
    for panel, batch in zip(panels[0], batches, strict=True):
        found = [m for m in report.measurements if m.batch == batch]
        times = [m.ms for m in found]
        colours = []
        for m in found:
            colour = _COLOURS[report.implementations.index(m.variant.implementation)]
            colours.append(colour if m.variant.proposes else _BASE_COLOUR)
        bars = panel.bar(labels, times, color=colours, width=0.7)
        for bar, time in zip(bars, times, strict=True):
            at = (bar.get_x() + bar.get_width() / 2, time)
            panel.annotate(_digits(time), at, ha="center", va="bottom", fontsize=9)
        base = report.at(batch, BASE, "")
        if base is not None:
            panel.axhline(base.ms, color="#52606d", linestyle="--", linewidth=1, zorder=3)
        panel.set_title(f"batch {batch}", fontsize=10)
        panel.margins(y=0.12)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("milliseconds a block")
    note = textwrap.fill(report.method, int(width * 14))
    if BASE in labels:
        note += "\ndashed: base, the LM head alone"
    figure.suptitle(report.title, fontsize=11)
    figure.text(0.5, 0.01, note, ha="center", va="bottom", fontsize=8, color="#52606d")
    figure.tight_layout(rect=(0, 0.03 + 0.035 * note.count("\n"), 1, 1))
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _digits(ms: float) -> str:
    return f"{ms:.3f}" if ms < 10 else f"{ms:.1f}"
