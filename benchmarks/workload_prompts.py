"""One small file of prompts from a folder of workloads, to carry to a machine without them.

    python benchmarks/workload_prompts.py WORKLOADS OUT.jsonl [--each 32]

WORKLOADS holds a ``NAME.jsonl`` for each, with ``turns``, ``messages`` or a ``prompt`` a line, as
``fetch_workloads.py`` makes them of the public sets. The first prompts of each are written as
``{"workload": NAME, "prompt": TEXT}``, by turns: so the first lines of the file are a mixture too.
"""

from __future__ import annotations

import argparse
import json
from itertools import chain, zip_longest
from pathlib import Path

from knockon.cli.generate import read_prompts


def first_prompts(file: Path, count: int) -> list[str]:
    """The first user turns of a workload."""
    chats = read_prompts(None, file, raw=False)[:count]
    return [next(m["content"] for m in chat if m["role"] == "user") for chat in chats]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--each", type=int, default=32, help="prompts of a workload (default 32)")
    args = parser.parse_args()
    files = sorted(args.workloads.glob("*.jsonl"))
    if not files:
        parser.error(f"{args.workloads}: no .jsonl file")
    columns = [
        [{"workload": file.stem, "prompt": text} for text in first_prompts(file, args.each)]
        for file in files
    ]
    rows = [row for row in chain.from_iterable(zip_longest(*columns)) if row is not None]
    args.out.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    print(f"{len(rows)} prompts of {len(files)} workloads, {args.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
