"""The report's files, written beside each other."""

from __future__ import annotations

from pathlib import Path

from knockon.bench.matrix.folder import ResultsFolder
from knockon.bench.matrix.report.html import to_html
from knockon.bench.matrix.report.markdown import to_markdown
from knockon.bench.matrix.report.plots import check_matplotlib, write_plots
from knockon.bench.matrix.report.results import Results
from knockon.bench.matrix.report.sections import sections
from knockon.errors import Refused

MARKDOWN, HTML = "report.md", "report.html"


def write_report(results_folder: Path, out: Path) -> str:
    """Write ``report.md``, its pictures, and ``report.html``, which holds them.

    Returns:
        The Markdown.

    Raises:
        Refused: a folder without results or one that cannot be written, or no matplotlib.
    """
    check_matplotlib()
    results = Results(ResultsFolder(results_folder))
    blocks = sections(results)
    text = to_markdown(blocks)
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_plots(results, out)
        (out / MARKDOWN).write_text(text, "utf-8")
        (out / HTML).write_text(to_html(blocks, out), "utf-8")
    except OSError as error:
        raise Refused("--out", str(out), f"a folder to write in ({error})") from None
    return text
