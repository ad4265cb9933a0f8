#!/usr/bin/env bash
# The engine's throughput on one GPU: target alone, DFlash and Domino at 1, 8 and 32 requests.
#
#   bash benchmarks/engine_h200.sh FOLDER [OPTIONS of knockon bench engine]
#
# Qwen3-8B's sizes in BF16 with random weights, 256 tokens in and 512 out, synthetic accept lengths.
# Writes engine_SHAPE as .json, .png and .txt into FOLDER.
# It runs on .venv (with `pip install -e '.[bench]'` for the plot) where that is there, else on
# python3; it needs torch, transformers, typer, rich and matplotlib, not an installed Knockon.
# SHAPE (a name), DEVICE, CONCURRENCY, INPUT_LEN, OUTPUT_LEN, REPEATS and PYTHON may be set, e.g.
# SHAPE=tiny DEVICE=cpu CONCURRENCY=1,2 INPUT_LEN=32 OUTPUT_LEN=32. Hybrid shapes (qwen3.6-27b) want
# fla-core too: without it PyTorch takes their prompts, much slower (the results say which). Further options go to the command:
# --verify-width 8,16,auto --alternate 1,32, say.
set -euo pipefail

: "${1:?FOLDER for the results}"
mkdir -p "$1"
out=$(cd "$1" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."

shape=${SHAPE:-qwen3-8b}
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH}
name=$out/engine_$shape
references=()
[ "$shape" = qwen3-8b ] && references=(--reference benchmarks/references/vllm_0.25.1_qwen3_8b.json)

"$python" -m knockon bench engine --model "$shape" --device "${DEVICE:-cuda}" \
    --methods target,dflash,domino --concurrency "${CONCURRENCY:-1,8,32}" \
    --input-len "${INPUT_LEN:-256}" --output-len "${OUTPUT_LEN:-512}" \
    --accept-length dflash=6.878,domino=9.163 --repeats "${REPEATS:-2}" --profile \
    "${references[@]}" --json "$name.json" --plot "$name.png" "${@:2}" | tee "$name.txt" || {
    code=$?
    [ -s "$name.txt" ] || rm -f "$name.txt"
    exit "$code"
}
