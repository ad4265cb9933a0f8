"""The plots: groups of bars by workload, a bar a method, the best outlined."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from knockon.bench.matrix.methods import TARGET, ServedMethod
from knockon.bench.matrix.report.facts import numerics
from knockon.bench.matrix.report.results import Results, Sample
from knockon.bench.matrix.report.sections import ACCEPT, MACRO, THROUGHPUT, title
from knockon.bench.matrix.report.tables import fastest, longest
from knockon.bench.workload_files import title_of
from knockon.errors import Refused

_COLOURS = {
    TARGET: ("#9aa5b1",),
    "mtp": ("#c9b5e4", "#8a66bd", "#5b3a94", "#e4daf2"),
    "dflash": ("#f0b27a", "#e0812b", "#b35f14", "#f7d9bd"),
    "domino": ("#8cc3e8", "#2680c2", "#0f4f82", "#c8e2f4"),
}
_GREY = "#52606d"


class Bar(NamedTuple):
    """A bar of one group: its height, the least and greatest it stands for, whether it is best."""

    height: float
    low: float
    high: float
    best: bool = False
    label: str = ""


def check_matplotlib() -> None:
    """Find out before anything is read whether plots can be drawn.

    Raises:
        Refused: no matplotlib.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise Refused("matplotlib", "not installed", "pip install matplotlib")


def write_plots(results: Results, folder: Path) -> None:
    """Draw every picture that the report shows."""
    workloads = [title_of(name) for name in results.workloads]

    def speed(method: ServedMethod, concurrency: int, workload: str) -> Bar | None:
        found = results.throughput(method.name, workload, concurrency)
        ratio = results.speed_up(method.name, workload, concurrency)
        label = "" if ratio is None or method.kind == TARGET else f"{ratio:.2f}x"
        return _bar(found, method.name == fastest(results, workload, concurrency), label)

    def accept(method: ServedMethod, concurrency: int, workload: str) -> Bar | None:
        found = results.accept_length(method.name, workload, concurrency)
        best = method.name in longest(results, workload, concurrency)
        return _bar(found, best, "" if found is None else f"{found.mean:.2f}")

    panels: list[tuple[str, Callable[..., Bar | None]]]
    for file, methods, name, of in (
        (THROUGHPUT, results.methods, "output tokens a second", speed),
        (ACCEPT, results.drafted, "tokens a verification", accept),
    ):
        panels = [
            (f"concurrency {c}", lambda method, group, c=c, of=of: of(method, c, group))
            for c in results.concurrencies
        ]
        _draw(folder / file, results, methods, (results.workloads, workloads), name, panels)
    _draw_macro(results, folder / MACRO)


def _draw_macro(results: Results, file: Path) -> None:
    groups = {str(c): [c] for c in results.concurrencies}
    if len(groups) > 1:
        groups["overall"] = results.concurrencies

    def bar(method: ServedMethod, group: str) -> Bar | None:
        found = {m.name: results.macro(m.name, groups[group]) for m in results.drafted}
        mine = found[method.name]
        if mine is None:
            return None
        whole = [each.mean for each in found.values() if each is not None and each.complete]
        best = mine.complete and len(whole) > 1 and mine.mean == max(whole)
        return Bar(mine.mean, mine.mean, mine.mean, best, f"{mine.mean:.2f}x")

    titles = [name if name == "overall" else f"concurrency {name}" for name in groups]
    name = "speed-up over target-only"
    _draw(file, results, results.drafted, (list(groups), titles), name, [("", bar)], line=1.0)


def _bar(sample: Sample | None, best: bool, label: str) -> Bar | None:
    if sample is None:
        return None
    return Bar(sample.mean, min(sample.values), max(sample.values), best, label)


def _draw(
    file: Path,
    results: Results,
    methods: Sequence[ServedMethod],
    groups: tuple[Sequence[str], Sequence[str]],
    name: str,
    panels: Sequence[tuple[str, Callable[..., Bar | None]]],
    line: float | None = None,
) -> None:
    """Draw a picture: a panel above another, of the same groups (names and titles) and methods."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    keys, titles = groups
    width = min(16.0, max(7.5, 1.6 + 0.3 * len(keys) * max(1, len(methods))))
    height = 0.9 + 2.9 * len(panels)
    figure, places = plt.subplots(len(panels), 1, figsize=(width, height), squeeze=False)
    colours = _colours(methods)
    for (heading, of), panel in zip(panels, places[:, 0], strict=True):
        for place, method in enumerate(methods):
            bars = [of(method, key) for key in keys]
            _draw_bars(panel, bars, place, len(methods), colours[method.name], method.title)
        if line is not None:
            panel.axhline(line, color=_GREY, linestyle="--", linewidth=1)
        panel.set_xticks(range(len(keys)), titles)
        panel.set_xlim(-0.5, len(keys) - 0.5)
        panel.set_ylabel(name)
        panel.set_title(heading, fontsize=10, loc="left")
        panel.margins(y=0.18)
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{title(results)}, {numerics(results)}", fontsize=11)
    handles, labels = places[0][0].get_legend_handles_labels()
    figure.legend(
        *(handles, labels),
        loc="lower center",
        ncols=min(len(methods) or 1, 9 if width > 11 else 5),
        fontsize=8,
        frameon=False,
    )
    rows = -(-max(1, len(methods)) // (9 if width > 11 else 5))
    figure.tight_layout(rect=(0, (0.1 + 0.2 * rows) / height, 1, 1))
    figure.savefig(file, dpi=130)
    plt.close(figure)


def _draw_bars(
    panel: Any, bars: Sequence[Bar | None], place: int, count: int, colour: str, label: str
) -> None:
    share = 0.84 / count
    for group, bar in enumerate(bars):
        at = group - 0.42 + (place + 0.5) * share
        if bar is None:
            panel.text(at, 0, "–", ha="center", va="bottom", fontsize=7, color=_GREY)
            continue
        edge = {"edgecolor": "black", "linewidth": 1.6, "zorder": 3} if bar.best else {}
        panel.bar(at, bar.height, width=share * 0.9, color=colour, **edge)
        if bar.high > bar.low:
            panel.vlines(at, bar.low, bar.high, color=_GREY, linewidth=1, zorder=4)
        tall = {"rotation": 90} if count > 4 or count * len(bars) > 16 else {}
        where = {"xytext": (0, 2), "textcoords": "offset points"}
        panel.annotate(
            bar.label, (at, bar.high), ha="center", va="bottom", fontsize=7, **tall, **where
        )
    panel.bar([0], [0], color=colour, label=label)  # a legend's entry, measured or not


def _colours(methods: Sequence[ServedMethod]) -> dict[str, str]:
    """Shades of a colour by kind."""
    found: dict[str, str] = {}
    seen: dict[str, int] = {}
    for method in methods:
        shades = _COLOURS[method.kind]
        found[method.name] = shades[seen.get(method.kind, 0) % len(shades)]
        seen[method.kind] = seen.get(method.kind, 0) + 1
    return found
