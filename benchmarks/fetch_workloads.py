"""The six workloads from their public data sets on the Hugging Face hub, as JSON lines.

    pip install datasets
    python benchmarks/fetch_workloads.py WORKLOADS [--each 128] [--only gsm8k,mbpp]

Writes ``WORKLOADS/NAME.jsonl``, a line ``{"id": "NAME/0", "turns": [TEXT, ...]}`` for each of the
first rows. For measuring: keep them out of training. The sets' licences are in docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple


class Source(NamedTuple):
    """Where a workload lies on the hub, and what a user says by one of its rows."""

    dataset: str
    config: str | None
    split: str
    turns: Callable[[Mapping[str, Any]], list[str]]


def function_to_complete(row: Mapping[str, Any]) -> list[str]:
    asked = (
        "Complete the following Python function. Answer with the whole function in one code block."
    )
    return [f"{asked}\n\n```python\n{row['prompt'].rstrip()}\n```"]


def function_to_write(row: Mapping[str, Any]) -> list[str]:
    return [f"{row['text']} Your code should pass this test:\n{row['test_list'][0]}"]


def instruction(row: Mapping[str, Any]) -> list[str]:
    return ["\n\n".join(part for part in (row["instruction"], row["input"]) if part)]


SOURCES = {
    "gsm8k": Source("openai/gsm8k", "main", "test", lambda row: [row["question"]]),
    "math500": Source("HuggingFaceH4/MATH-500", None, "test", lambda row: [row["problem"]]),
    "humaneval": Source("openai/openai_humaneval", None, "test", function_to_complete),
    "mbpp": Source("google-research-datasets/mbpp", "full", "test", function_to_write),
    "mt-bench": Source(
        "HuggingFaceH4/mt_bench_prompts", None, "train", lambda row: list(row["prompt"])
    ),
    "alpaca": Source("tatsu-lab/alpaca", None, "train", instruction),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", type=Path, help="folder to write to")
    parser.add_argument("--each", type=int, default=128, help="rows of a workload (default 128)")
    parser.add_argument("--only", default=",".join(SOURCES), help="names, with commas between")
    args = parser.parse_args()
    names = [name.strip() for name in args.only.split(",")]
    unknown = [name for name in names if name not in SOURCES]
    if unknown:
        parser.error(f"--only: {', '.join(unknown)}; there are {', '.join(SOURCES)}")
    if args.each < 1:
        parser.error("--each: at least 1")
    try:
        from datasets import load_dataset
    except ImportError:
        parser.error("needs the package datasets: pip install datasets")
    args.workloads.mkdir(parents=True, exist_ok=True)
    for name in names:
        source = SOURCES[name]
        rows = load_dataset(source.dataset, source.config, split=source.split)
        lines = [
            json.dumps({"id": f"{name}/{number}", "turns": source.turns(row)})
            for number, row in enumerate(islice(rows, args.each))
        ]
        file = args.workloads / f"{name}.jsonl"
        file.write_text("\n".join([*lines, ""]), "utf-8")
        print(f"{file}: {len(lines)} prompts of {source.dataset}")


if __name__ == "__main__":
    main()
