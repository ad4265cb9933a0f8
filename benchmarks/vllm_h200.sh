#!/usr/bin/env bash
# Domino inside vLLM on one GPU: agreement, losslessness, speed and step times (vllm_h200.py).
#
#   bash benchmarks/vllm_h200.sh FOLDER [OPTIONS of vllm_h200.py]
#
# PYTHON (default python3) must have one of the vLLM versions of docs/vllm.md. Knockon is installed
# into it without its dependencies, which vLLM brings, so that vLLM finds the plugin.
set -euo pipefail

: "${1:?FOLDER for the results}"
mkdir -p "$1"
out=$(cd "$1" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
"$python" -m pip install --quiet --no-deps --no-build-isolation -e .
"$python" -c 'from importlib.metadata import entry_points as e
assert "knockon" in e(group="vllm.general_plugins").names, "the plugin is not installed"'
"$python" -m knockon doctor
"$python" benchmarks/vllm_h200.py "$out" "${@:2}" | tee "$out/vllm.txt"
