"""A start is quick: the HTTP process loads nothing that only computing needs."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from tests.server.running import ServerProcess


def test_the_http_process_imports_neither_torch_nor_transformers() -> None:
    code = "import knockon.cli.serve, knockon.server.run, sys; print(sorted(sys.modules))"
    loaded = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout
    assert "'fastapi'" in loaded
    assert "'torch'" not in loaded and "'transformers'" not in loaded


def test_both_processes_keep_what_their_start_has_made_from_the_collector(
    server: ServerProcess,
) -> None:
    counts = re.findall(r"objects that garbage collection leaves out: (\d+)", server.log)
    assert len(counts) == 2 and min(map(int, counts)) > 10_000


def test_server_info_tells_the_machine_and_the_models_sizes(server: ServerProcess) -> None:
    info = server.info()
    assert info["environment"]["versions"]["torch"] and info["environment"]["cpu"]
    assert info["model_sizes"]["num_layers"] == 4 and info["model_sizes"]["vocab_size"] > 0
    assert info["engine"]["device"] == "cpu" and info["engine"]["dtype"] == "float32"
