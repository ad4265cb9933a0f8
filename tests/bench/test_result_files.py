"""What was measured can be found: pages name every result file, and none that is not there."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "benchmarks" / "notes.md", *(ROOT / "docs").glob("*.md")]
FILE = r"[\w.*-]+\.(?:json|png|tar\.gz)\b"


def test_pages_and_result_files_name_each_other() -> None:
    text = "".join(page.read_text("utf-8") for page in PAGES)
    files = [file.name for file in (ROOT / "benchmarks" / "results").iterdir()]
    named = set(re.findall(FILE, text))
    assert sorted(f for f in files if not any(fnmatch(f, name) for name in named)) == []
    pointed_at = set(re.findall(f"benchmarks/results/({FILE})", text))
    assert sorted(p for p in pointed_at if not any(fnmatch(f, p) for f in files)) == []
