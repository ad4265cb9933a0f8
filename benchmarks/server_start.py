"""Where a server's start goes: of ``knockon serve`` from outside, and of its engine part by part.

    python benchmarks/server_start.py --model smollm2-135m --draft smollm2-135m-domino \
        --concurrency 1,8,32 --json benchmarks/results/server_start.json

``listening`` and ``ready`` count from the creation of the process, ``stop`` from SIGTERM to its
end. The engine's parts are those of a process that does what the server's engine process does; on a
GPU the graphs' capture is told apart within ``load``. Medians of --repeats.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from knockon.bench.matrix.server import ServerProcess
from knockon.models.catalog import resolve

ENGINE = """
import json, sys, time
began, arguments = float(sys.argv[1]), json.loads(sys.argv[2])
parts, last = {}, began
def part(name):
    global last
    now = time.time()
    parts[name], last = now - last, now
part("python")
import torch
part("import torch")
import transformers
part("import transformers")
import knockon.server.engine_process, knockon.engine.llm, knockon.server.engine_loop
part("import knockon")
if torch.cuda.is_available():
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
part("device")
llm = knockon.engine.llm.LLM(**arguments)
part("load")
graphs = getattr(llm._engine.runner, "graphs", None)
parts["of it capture"] = graphs.seconds if graphs else 0.0
parts["graphs"] = graphs.count if graphs else 0
print(json.dumps(parts))
"""


def serve(model: str, draft: str | None, concurrency: int, log: Path) -> dict[str, float]:
    """One server's start and end."""
    arguments = ["--model-path", model, "--max-running-requests", str(concurrency)]
    if draft is not None:
        arguments += ["--speculative-draft-model-path", draft]
    with ServerProcess(arguments, log) as server:
        start = server.wait_ready(900)
        began = time.perf_counter()
        server.stop()
        return vars(start) | {"stop": time.perf_counter() - began}


def engine(model: str, draft: str | None, concurrency: int) -> dict[str, float]:
    """The parts of one engine's start."""
    arguments = json.dumps({"model": model, "draft": draft, "max_batch_size": concurrency})
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-P", "-c", ENGINE, str(time.time()), arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def medians(found: list[dict[str, float]]) -> dict[str, float]:
    """Of each part."""
    return {name: round(statistics.median(f[name] for f in found), 3) for name in found[0]}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--draft", default="smollm2-135m-domino")
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    model, draft = str(resolve(asked.model)), str(resolve(asked.draft, "draft"))
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        for name, drafter in (("target", None), (asked.draft, draft)):
            for concurrency in map(int, asked.concurrency.split(",")):
                server = [serve(model, drafter, concurrency, log) for _ in range(asked.repeats)]
                parts = [engine(model, drafter, concurrency) for _ in range(asked.repeats)]
                row = {
                    "draft": name,
                    "concurrency": concurrency,
                    "server": medians(server),
                    "engine": medians(parts),
                }
                results.append(row)
                print(json.dumps(row), flush=True)
    if asked.json is not None:
        from knockon.bench.environment import environment

        settings = vars(asked) | {"json": None}
        found = {"settings": settings, "environment": environment(), "results": results}
        asked.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
