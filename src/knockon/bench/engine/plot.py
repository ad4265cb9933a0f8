"""A report as a picture: a panel a concurrency, a bar a method; below, a step's time by part."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from knockon.bench.engine.parts import PARTS
from knockon.bench.engine.report import EngineReport

_COLOURS = {"target": "#9aa5b1", "dflash": "#e0812b", "domino": "#2680c2"}
_PART_COLOURS = ("#2680c2", "#e0812b", "#7a4fb5", "#3f9142", "#c94f7c", "#8c6d46", "#9aa5b1")
_RIGHT = 0.8  # where the panels end and the legend of the parts begins


def write_plot(report: EngineReport, path: Path) -> None:
    """Draw the report. Panels have scales of their own, since concurrencies differ by far."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    concurrencies = report.settings.concurrency
    rows = 2 if report.profiled else 1
    width = max(7.5, len(concurrencies) * (1.2 + 0.8 * len(report.settings.variants)))
    size = (width, 3.6 * rows + 0.8)
    figure, panels = plt.subplots(rows, len(concurrencies), figsize=size, squeeze=False)
    for column, concurrency in enumerate(concurrencies):
        _draw_speed(panels[0][column], report, concurrency)
        if rows == 2:
            _draw_parts(panels[1][column], report, concurrency)
    panels[0][0].set_ylabel("output tokens a second")
    note = textwrap.fill(report.method, int(width * 14))
    if report.reference is not None:
        theirs = f"dashed: {report.reference.name}"
        different = report.reference.differences(report.settings)
        theirs += f" (not alike: {different})" if different else ""
        note += "\n" + textwrap.fill(theirs, int(width * 14))
    if rows == 2:
        panels[1][0].set_ylabel("milliseconds a decode step, traced")
        handles, labels = panels[1][0].get_legend_handles_labels()
        figure.legend(
            *(handles[::-1], labels[::-1]),
            loc="center left",
            bbox_to_anchor=(_RIGHT, 0.32),
            fontsize=8,
            frameon=False,
        )
    figure.suptitle(report.title, fontsize=11)
    figure.text(0.5, 0.01, note, ha="center", va="bottom", fontsize=8, color="#52606d")
    right = _RIGHT if rows == 2 else 1
    figure.tight_layout(rect=(0, (0.24 + 0.13 * note.count("\n")) / size[1], right, 1))
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)


def _draw_speed(panel: Any, report: EngineReport, concurrency: int) -> None:
    found = [m for m in report.measurements if m.concurrency == concurrency]
    speeds = [m.tokens_per_second for m in found]
    labels = [_on_two_lines(m.variant.label) for m in found]
    colours = [_COLOURS[m.variant.method] for m in found]
    bars = panel.bar(labels, speeds, color=colours, width=0.7)
    for bar, speed in zip(bars, speeds, strict=True):
        at = (bar.get_x() + bar.get_width() / 2, speed)
        panel.annotate(f"{speed:.0f}", at, ha="center", va="bottom", fontsize=9)
        if report.reference is not None:
            method = found[bars.index(bar)].variant.method
            theirs = report.reference.tokens_per_second.get((method, concurrency))
            if theirs is not None:
                edges = (bar.get_x(), bar.get_x() + bar.get_width())
                panel.hlines(theirs, *edges, color="#52606d", linestyle="--", linewidth=1.2)
    panel.set_title(f"{concurrency} in flight", fontsize=10)
    panel.margins(y=0.12)
    panel.spines[["top", "right"]].set_visible(False)


def _on_two_lines(label: str) -> str:
    return label.replace(" ", "\n")


def _draw_parts(panel: Any, report: EngineReport, concurrency: int) -> None:
    """Stacked parts; what is left of the traced step's time is drawn hollow.

    Parts can add up to more than the step, where kernels wait inside for the one ahead.
    """
    profiled = [
        (_on_two_lines(m.variant.label), m.profile)
        for m in report.measurements
        if m.concurrency == concurrency and m.profile is not None
    ]
    labels = [method for method, _ in profiled]
    bottoms = [0.0] * len(labels)
    for part, colour in zip(PARTS, _PART_COLOURS, strict=True):
        heights = [profile.parts_ms[part] for _, profile in profiled]
        panel.bar(labels, heights, bottom=bottoms, color=colour, width=0.7, label=part)
        bottoms = [low + height for low, height in zip(bottoms, heights, strict=True)]
    rest = [
        max(0.0, profile.wall_ms - low) for (_, profile), low in zip(profiled, bottoms, strict=True)
    ]
    panel.bar(
        labels,
        rest,
        bottom=bottoms,
        fill=False,
        edgecolor="#9aa5b1",
        width=0.7,
        label="rest of the step",
    )
    places = range(len(profiled))
    walls = [profile.wall_ms for _, profile in profiled]
    starts, ends = [x - 0.42 for x in places], [x + 0.42 for x in places]
    panel.hlines(walls, starts, ends, color="black", linewidth=1.5, label="the step")
    panel.set_ylim(0, 1.08 * max(*bottoms, *walls))
    panel.spines[["top", "right"]].set_visible(False)
