"""How much the HTTP process streams: ``knockon serve`` with an engine that only pretends.

    python benchmarks/front_end.py --prompts PROMPTS.jsonl --json front_end.json

Each case is a step's time, the tokens that it gives each stream, and how many streams there are:
together what a fast GPU would hand over. ``delivered`` is what ``knockon bench serving`` received,
as a share of that; below one, requests wait for the HTTP process, or for the client. Prompts go
through the chat template. The three processes share this machine's cores.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pretended_engine
from rich.console import Console
from rich.table import Table

from knockon.bench.environment import environment
from knockon.bench.serving.run import BenchFailed, measure
from knockon.bench.serving.settings import ServingSettings
from knockon.bench.whole_file import write_whole
from knockon.models.catalog import resolve

# Step in ms, tokens a stream and step, streams: SmolLM2 on an H200 takes 0.9 to 1.6 ms.
CASES = ((1.0, 1, 8), (1.0, 1, 32), (1.4, 4, 8), (1.4, 4, 32), (0.4, 4, 32))


def serve(model: str, streams: int, port: int) -> None:
    """The server, in a process of its own."""
    from knockon.server import engine_client
    from knockon.server.run import serve as run
    from knockon.server.settings import ServerSettings

    engine_client.ENGINE = "pretended_engine"
    engine = {"model": model, "max_batch_size": streams}
    run(ServerSettings(engine=engine, port=port, served_model_name="none", log_level="warning"))


def measure_case(
    asked: argparse.Namespace, case: tuple[float, int, int], folder: Path
) -> dict[str, Any]:
    """One case on a server of its own."""
    step_ms, tokens, streams = case
    variables = {pretended_engine.STEP_MS: str(step_ms), pretended_engine.TOKENS: str(tokens)}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, __file__, "--serve", str(streams), str(port), "--model", asked.model]
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(command, env=os.environ | variables, stderr=log)
    settings = ServingSettings(
        base_url=f"http://127.0.0.1:{port}",
        dataset=asked.prompts,
        num_prompts=asked.requests_each * streams,
        output_len=512,
        max_concurrency=streams,
        warmup_requests=streams,
        chat=True,
        ignore_eos=False,
    )
    try:
        for _ in range(200):
            try:
                report = measure(settings)
                break
            except BenchFailed:  # not there yet
                if server.poll() is not None:
                    raise
                time.sleep(0.1)
    finally:
        server.terminate()
        server.wait(30)
    if wrong := [each.error for each in report.requests if each.error]:
        raise SystemExit(f"a request failed: {wrong[0]}")
    summary = report.summary.as_dict()
    offered = 1000 / step_ms * tokens * summary["concurrency"]
    return {
        "step_ms": step_ms,
        "tokens_per_step": tokens,
        "streams": streams,
        "requests": len(report.requests),
        "tokens_per_second": summary["output_throughput"],
        "events_per_second": summary["output_throughput"] / tokens,
        "delivered": summary["output_throughput"] / offered,
        "ttft_ms": summary["ttft"],
        "itl_ms": summary["itl"],
    }


def main() -> None:
    """Measure every case, show, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m", help="whose tokenizer and template")
    parser.add_argument("--prompts", type=Path, help="JSON lines or ShareGPT's JSON")
    parser.add_argument("--requests-each", type=int, default=4, help="requests a stream")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", type=int, nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        serve(str(resolve(asked.model)), *asked.serve)
        return
    if asked.prompts is None:
        parser.error("--prompts: a file is needed")
    table = Table(
        "step, ms", "tokens a step", "streams", "tok/s", "events/s", "delivered", "TTFT ms"
    )
    found: dict[str, Any] = {"environment": environment(), "cases": []}
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            row = measure_case(asked, case, Path(folder))
            found["cases"].append(row)
            table.add_row(
                f"{row['step_ms']}",
                str(row["tokens_per_step"]),
                str(row["streams"]),
                f"{row['tokens_per_second']:.0f}",
                f"{row['events_per_second']:.0f}",
                f"{row['delivered']:.2f}",
                f"{row['ttft_ms']['mean']:.1f}",
            )
            if asked.json:
                write_whole(asked.json, json.dumps(found, indent=1) + "\n")
    Console().print(table)


if __name__ == "__main__":
    main()
