#!/usr/bin/env bash
# Domino inside vLLM on one GPU: agreement, losslessness, speed and step times (vllm_h200.py).
#
#   bash benchmarks/vllm_h200.sh FOLDER [OPTIONS of vllm_h200.py]
#
# PYTHON (default python3) must have one of the vLLM versions of docs/vllm.md. Where it does not
# find the plugin yet, Knockon is installed into it without its dependencies, which vLLM brings.
set -euo pipefail

: "${1:?FOLDER for the results}"
mkdir -p "$1"
out=$(cd "$1" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
found() {
    "$python" -c 'import sys
from importlib.metadata import entry_points
sys.exit("knockon" not in entry_points(group="vllm.general_plugins").names)'
}
found || "$python" -m pip install --quiet --no-deps --no-build-isolation -e .
found || { echo "the plugin is not installed" >&2; exit 1; }
"$python" -m knockon doctor
"$python" benchmarks/vllm_h200.py "$out" "${@:2}" | tee "$out/vllm.txt"
