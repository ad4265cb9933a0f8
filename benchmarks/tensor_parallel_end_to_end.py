"""SmolLM2 and its drafter on several ranks: the same tokens, offline and served, and how fast.

    python benchmarks/tensor_parallel_end_to_end.py --ranks 2 --out FOLDER

- lossless: in FP32, Domino at fixed widths and ``auto`` must give the target's own answers on the
  same ranks, token for token, eight requests at a time and one; so must a server's. How many of
  them are those of one rank, whose sums are added in another order, is told.
- speed: in BF16, tokens a second of the target alone and of Domino, on one rank and on all.
- served: ``knockon serve --tp-size N`` under ``knockon bench serving``, in BF16.

Writes ``end_to_end_tpN.json`` and prints a table. The exit status is 1 where an answer in FP32 is
another than the target's own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from knockon import LLM, SamplingParams
from knockon.bench.environment import environment
from knockon.bench.loaded import mean_accept_length
from knockon.bench.matrix.server import ServerFailed, ServerProcess
from knockon.engine.request import RequestOutput

HERE = Path(__file__).parent
KV_MEMORY = 2 << 30
_START = 300.0  # s a server may take to get ready
TOGETHER = 8


class Bench:
    """What the parts share."""

    def __init__(self, args: argparse.Namespace, console: Console) -> None:
        self.args = args
        self.console = console
        rows = [json.loads(line) for line in args.prompts.read_text("utf-8").split("\n") if line]
        self.num_prompts = len(rows)
        # Spread over the file, so that every workload has its part.
        rows = rows[:: max(1, len(rows) // args.count)]
        self.chats = [[{"role": "user", "content": row["prompt"]}] for row in rows]
        self.params = SamplingParams(temperature=0, max_tokens=args.new_tokens)

    @contextlib.contextmanager
    def llm(self, ranks: int, dtype: str, width: int | str | None) -> Generator[LLM, None, None]:
        """The target, with its drafter where a width is given."""
        a = self.args
        began = time.perf_counter()
        with LLM(
            a.model,
            draft=a.draft if width else None,
            tp_size=ranks,
            dtype=dtype,
            device=a.device,
            verify_width=width,
            kv_memory=KV_MEMORY,
            max_model_len=a.longest,
            max_batch_size=TOGETHER if dtype == "float32" else max(a.concurrency),
            prefix_cache=False,
        ) as found:
            self.console.print(
                f"{ranks} rank(s), {dtype}, width {width or 1}: ready in "
                f"{time.perf_counter() - began:.1f} s",
                style="dim",
            )
            yield found

    def answers(self, llm: LLM, count: int, concurrency: int) -> tuple[list[RequestOutput], float]:
        """So many prompts, so many in flight at once: answers, seconds."""
        queue = iter(list(islice(cycle(self.chats), count)))
        order = [llm.add(chat, self.params) for chat in islice(queue, concurrency)]
        done: dict[str, RequestOutput] = {}
        began = time.perf_counter()
        while len(done) < count:
            for output in llm.step():
                if output.finished is not None:
                    done[output.request_id] = output.finished
                    order += [llm.add(chat, self.params) for chat in islice(queue, 1)]
        return [done[each] for each in order], time.perf_counter() - began


def identical(ours: Sequence[RequestOutput], theirs: Sequence[RequestOutput]) -> int:
    """How many answers have the same tokens."""
    return sum(a.token_ids == b.token_ids for a, b in zip(ours, theirs, strict=True))


def lossless(bench: Bench) -> tuple[list[dict[str, Any]], list[str]]:
    """FP32: Domino on all ranks held to the target alone; the target's texts."""
    args = bench.args
    counts = {TOGETHER: min(args.count, len(bench.chats)), 1: min(args.single, len(bench.chats))}
    with bench.llm(1, "float32", None) as llm:
        one_rank = bench.answers(llm, counts[TOGETHER], TOGETHER)[0]
    with bench.llm(args.ranks, "float32", None) as llm:
        alone = {batch: bench.answers(llm, count, batch)[0] for batch, count in counts.items()}
    rows = []
    for width in (*args.widths, "auto"):
        with bench.llm(args.ranks, "float32", width) as llm:
            for batch, count in counts.items():
                ours, _ = bench.answers(llm, count, batch)
                row = {
                    "width": width,
                    "batch": batch,
                    "answers": count,
                    "identical": identical(ours, alone[batch]),
                    "as_on_one_rank": identical(ours, one_rank[:count]),
                    "accept_length": round(mean_accept_length(ours), 3),
                }
                rows.append(row)
                bench.console.print(
                    f"FP32, {args.ranks} ranks, Domino {width}, batch {batch}: "
                    f"{row['identical']} of {count} identical ({row['as_on_one_rank']} to one "
                    f"rank's), accept length {row['accept_length']:.2f}"
                )
    return rows, [output.text for output in alone[TOGETHER]]


def speed(bench: Bench) -> list[dict[str, Any]]:
    """BF16: tokens a second, by ranks and requests in flight."""
    args, rows = bench.args, []
    for ranks in (1, args.ranks):
        for method, width in (("target", None), ("Domino", args.widths[-1])):
            with bench.llm(ranks, "bfloat16", width) as llm:
                for concurrency in args.concurrency:
                    bench.answers(llm, concurrency, concurrency)
                    count = max(2 * concurrency, 8)
                    outputs, seconds = bench.answers(llm, count, concurrency)
                    tokens = sum(len(output.token_ids) for output in outputs)
                    rows.append(
                        {
                            "ranks": ranks,
                            "method": method,
                            "concurrency": concurrency,
                            "tokens_per_second": round(tokens / seconds, 1),
                            "accept_length": round(mean_accept_length(outputs), 3),
                            "tokens": tokens,
                        }
                    )
    return rows


@contextlib.contextmanager
def serving(bench: Bench, dtype: str, log: Path) -> Generator[str, None, None]:
    """A server on all ranks; its address."""
    args = bench.args
    arguments = ["--model-path", args.model, "--speculative-draft-model-path", args.draft]
    arguments += ["--tp-size", str(args.ranks), "--dtype", dtype, "--device", args.device]
    arguments += ["--kv-memory", str(KV_MEMORY), "--context-length", str(args.longest)]
    arguments += ["--max-running-requests", str(max(args.concurrency))]
    arguments += ["--verify-width", str(args.widths[-1])]
    with ServerProcess(arguments, log) as server:
        try:
            server.wait_ready(_START)
        except ServerFailed as error:
            sys.exit(f"{error}:\n{server.log}")
        yield server.url


def served(bench: Bench, texts: Sequence[str], folder: Path) -> dict[str, Any]:
    """What a server on all ranks answers in FP32, and its speed in BF16."""
    args = bench.args
    log = folder / f"serve_tp{args.ranks}.log"

    def ask(url: str, chat: list[dict[str, str]]) -> str:
        body = {"messages": chat, "temperature": 0, "max_tokens": args.new_tokens}
        answer = httpx.post(url + "/v1/chat/completions", json=body, timeout=600)
        answer.raise_for_status()
        return str(answer.json()["choices"][0]["message"]["content"])

    found: dict[str, Any] = {}
    if texts:
        with serving(bench, "float32", log) as url, ThreadPoolExecutor(TOGETHER) as pool:
            chats = bench.chats[: len(texts)]
            given = list(pool.map(lambda chat: ask(url, chat), chats))
        found["answers"] = len(texts)
        found["identical"] = sum(a == b for a, b in zip(given, texts, strict=True))
        bench.console.print(
            f"FP32, served on {args.ranks} ranks: {found['identical']} of {len(texts)} identical"
        )
    found["speed"] = []
    with serving(bench, "bfloat16", log) as url:
        for concurrency in args.concurrency:
            target = folder / f"serving_tp{args.ranks}_{concurrency}.json"
            command = [sys.executable, "-m", "knockon", "bench", "serving", "--base-url", url]
            command += ["--dataset-path", str(args.prompts), "--apply-chat-template"]
            asked = min(max(2 * concurrency, 8), bench.num_prompts)
            command += ["--num-prompts", str(asked), "--disable-progress"]
            command += ["--output-len", str(args.new_tokens), "--disable-ignore-eos"]
            command += ["--max-concurrency", str(concurrency), "--json", str(target)]
            command += ["--warmup-requests", str(concurrency)]
            subprocess.run(command, check=True)
            found["speed"].append(json.loads(target.read_text("utf-8")))
            target.unlink()
    log.unlink()
    return found


def main() -> int:
    """Run the parts; 1 where an answer is wrong."""
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=formatter)
    add = parser.add_argument
    add("--ranks", type=int, default=2)
    add("--parts", nargs="+", choices=("lossless", "speed", "served"))
    add("--prompts", type=Path, default=HERE / "prompts" / "questions.jsonl", help="JSON lines")
    add("--count", type=int, default=32, help="prompts that are compared, eight at a time")
    add("--single", type=int, default=8, help="of them, compared one at a time as well")
    add("--new-tokens", type=int, default=96)
    add("--longest", type=int, default=2048, help="positions of a request")
    add("--widths", type=int, nargs="+", default=[8, 16], help="fixed verify widths")
    add("--concurrency", type=int, nargs="+", default=[1, 32])
    add("--model", default="smollm2-135m", help="catalogue name or path")
    add("--draft", default="smollm2-135m-domino", help="its Domino drafter")
    add("--device", default="auto")
    add("--out", type=Path, default=HERE / "results", help="folder of the JSON file")
    args = parser.parse_args()
    parts = args.parts or ("lossless", "speed", "served")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    bench = Bench(args, console)
    args.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {
        "what": "the real model and its drafter on several ranks: same tokens, speed, served",
        "environment": environment(),
        "settings": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()},
    }
    path = args.out / f"end_to_end_tp{args.ranks}.json"

    def keep() -> None:
        path.write_text(json.dumps(result, indent=2) + "\n", "utf-8")

    wrong, texts = 0, []
    if "lossless" in parts:
        result["lossless"], texts = lossless(bench)
        wrong += sum(row["answers"] - row["identical"] for row in result["lossless"])
        keep()
    if "speed" in parts:
        result["speed"] = speed(bench)
        keep()
    if "served" in parts:
        result["served"] = served(bench, texts, args.out)
        wrong += result["served"].get("answers", 0) - result["served"].get("identical", 0)
        keep()
    console.print(speed_table(result, args.ranks))
    console.print(f"{path}: {wrong} wrong answers")
    return min(wrong, 1)


def speed_table(result: dict[str, Any], ranks: int) -> Table:
    """Offline and served, one table."""
    table = Table(title="Output tokens a second, BF16", title_justify="left")
    table.add_column("")
    for heading in ("ranks", "in flight", "tokens/s", "accept length"):
        table.add_column(heading, justify="right")
    rows = [
        (row["method"], row["ranks"], *(row[k] for k in ("concurrency", "tokens_per_second")), row)
        for row in result.get("speed", ())
    ]
    for name, count, concurrency, rate, row in rows:
        cells = (str(count), str(concurrency), f"{rate:.0f}", f"{row['accept_length']:.2f}")
        table.add_row(name, *cells)
    for concurrency, found in zip(
        result["settings"]["concurrency"], result.get("served", {}).get("speed", ()), strict=False
    ):
        summary = found["summary"]
        cells = (f"{summary['output_throughput']:.0f}", f"{summary['accept_length'] or 0:.2f}")
        table.add_row("Domino, served", str(ranks), str(concurrency), *cells)
    return table


if __name__ == "__main__":
    sys.exit(main())
