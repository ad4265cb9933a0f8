"""A report as a picture: a group of bars a workload, a bar a method."""

from __future__ import annotations

import textwrap
from pathlib import Path

from knockon.bench.acceptance.methods import TARGET
from knockon.bench.acceptance.report import AcceptanceReport

_COLOURS = {
    "mtp": ("#7a4fb5", "#9d7ccb", "#c3aee0"),
    "dflash": ("#e0812b", "#f0b27a"),
    "domino": ("#2680c2", "#7db8e0"),
}


def write_plot(report: AcceptanceReport, path: Path) -> None:
    """Draw accept lengths, the mean over workloads as the last group."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    methods = [method for method in report.methods if method.kind != TARGET]
    groups = [workload.title for workload in report.workloads] + ["mean"]
    width = max(7.5, 0.8 + 0.32 * len(groups) * max(1, len(methods)))
    figure, panel = plt.subplots(figsize=(width, 4.2))
    share = 0.84 / max(1, len(methods))
    drawn: dict[str, int] = {}
    for place, method in enumerate(methods):
        shades = _COLOURS[method.kind]
        shade = shades[drawn.get(method.kind, 0) % len(shades)]
        drawn[method.kind] = drawn.get(method.kind, 0) + 1
        heights = [report.cells[method.name, w.name].accept_length for w in report.workloads]
        heights.append(report.mean(method, lambda cell: cell.accept_length))
        at = [group - 0.42 + (place + 0.5) * share for group in range(len(groups))]
        panel.bar(at, heights, width=share * 0.92, color=shade, label=method.title)
    panel.axhline(1.0, color="#52606d", linestyle="--", linewidth=1)
    panel.set_xticks(range(len(groups)), groups)
    panel.set_ylabel("tokens per verification")
    panel.set_title(report.title, fontsize=11, pad=24 if methods else 6)
    panel.spines[["top", "right"]].set_visible(False)
    if methods:
        panel.legend(
            fontsize=8,
            frameon=False,
            ncols=len(methods),
            loc="lower center",
            bbox_to_anchor=(0.5, 1),
        )
    note = textwrap.fill(report.method + " Dashed: the target alone.", int(width * 14))
    figure.text(0.5, 0.01, note, ha="center", va="bottom", fontsize=8, color="#52606d")
    figure.tight_layout(rect=(0, 0.06 + 0.035 * note.count("\n"), 1, 1))
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)
