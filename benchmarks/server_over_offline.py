"""What a server costs: its output tokens a second over those of ``LLM.generate`` on the same work.

    python benchmarks/server_over_offline.py --prompts PROMPTS.jsonl --json server_over_offline.json

The same conversations, greedy, at most --max-tokens each, --concurrency at a time: through
``knockon serve`` with every answer streamed to a client on this machine, and by an engine without a
server, all prompts at once. Both run with the same settings, by turns, the other one's processes
idle. The client, the HTTP process and the engine share the machine's cores. Answers must be the
same.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from knockon.bench.environment import environment
from knockon.bench.matrix.server import ServerProcess
from knockon.bench.serving.dataset import read_dataset
from knockon.bench.serving.run import measure
from knockon.bench.serving.settings import ServingSettings
from knockon.bench.whole_file import write_whole
from knockon.engine.llm import LLM
from knockon.engine.sampling_params import SamplingParams
from knockon.models.catalog import resolve


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--draft", default="smollm2-135m-domino")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines or ShareGPT's JSON")
    parser.add_argument("--count", type=int, default=32, help="conversations, the file's first")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--verify-width", default="8")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    for name in ("count", "max_tokens", "concurrency", "repeats"):
        if getattr(asked, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: at least 1")
    if asked.json and not asked.json.parent.is_dir():
        parser.error(f"--json: {asked.json.parent} is no folder")
    return asked


def served(url: str, prompts: Path, asked: argparse.Namespace) -> tuple[float, list[str]]:
    """Tokens a second through the server, and the answers."""
    report = measure(
        ServingSettings(
            base_url=url,
            dataset=prompts,
            output_len=asked.max_tokens,
            max_concurrency=asked.concurrency,
            warmup_requests=asked.concurrency,
            chat=True,
            flush_cache=True,
            ignore_eos=False,
        )
    )
    if wrong := [each.error for each in report.requests if each.error]:
        raise SystemExit(f"a request failed: {wrong[0]}")
    return report.summary.output_throughput, [each.text for each in report.requests]


def offline(
    llm: LLM, conversations: list[list[dict[str, Any]]], max_tokens: int
) -> tuple[float, list[str]]:
    """Tokens a second of the engine alone, chat template included, and the answers."""
    llm.flush_cache()
    began = time.perf_counter()
    outputs = llm.generate(conversations, SamplingParams(temperature=0.0, max_tokens=max_tokens))
    seconds = time.perf_counter() - began
    return sum(len(each.token_ids) for each in outputs) / seconds, [each.text for each in outputs]


def main() -> int:
    """Measure, show, write."""
    asked = parse()
    model, draft = resolve(asked.model), resolve(asked.draft)
    chosen = read_dataset(asked.prompts)[: asked.count]
    serve = ["--model-path", str(model), "--speculative-draft-model-path", str(draft)]
    serve += ["--dtype", asked.dtype, "--max-running-requests", str(asked.concurrency)]
    serve += ["--speculative-num-draft-tokens", asked.verify_width]
    width = asked.verify_width if asked.verify_width == "auto" else int(asked.verify_width)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"messages": p.messages}) + "\n" for p in chosen))
        server = ServerProcess(serve, Path(folder) / "server.log")
        alone = LLM(
            model,
            draft,
            dtype=asked.dtype,
            max_batch_size=asked.concurrency,
            verify_width=width,
        )
        with server, alone:
            server.wait_ready(900)
            offline(alone, [p.messages for p in chosen[: asked.concurrency]], 16)
            for number in range(asked.repeats):
                through, texts = served(server.url, prompts, asked)
                bare, expected = offline(alone, [p.messages for p in chosen], asked.max_tokens)
                rows.append({"served": through, "offline": bare, "ratio": through / bare})
                same = sum(a == b for a, b in zip(texts, expected, strict=True))
                rows[-1] |= {"same_answers": same, "answers": len(texts)}
                print(
                    f"{number + 1} of {asked.repeats}: served {through:.1f} tok/s, offline "
                    f"{bare:.1f}, ratio {through / bare:.3f}; {same} of {len(texts)} answers alike",
                    flush=True,
                )
            settings = {name: str(value) for name, value in vars(asked).items() if name != "json"}
            settings["prompts"] = asked.prompts.name
            engine = alone.config
    found = {
        "environment": environment(),
        "settings": settings | {"dtype": engine.dtype, "device": engine.device},
        "repeats": rows,
        "median_ratio": statistics.median(row["ratio"] for row in rows),
    }
    print(f"median ratio {found['median_ratio']:.3f}")
    if asked.json:
        write_whole(asked.json, json.dumps(found, indent=1) + "\n")
    return 0 if all(row["same_answers"] == row["answers"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
