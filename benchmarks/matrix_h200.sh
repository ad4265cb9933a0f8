#!/usr/bin/env bash
# Methods × workloads × concurrencies on one GPU, a fresh server for each cell, and the report.
#
#   DOMINO=PATH [DFLASH=PATH] [MTP=PATH] bash benchmarks/matrix_h200.sh WORKLOADS RESULTS REPORT \
#       [OPTIONS of knockon bench matrix] [-- OPTIONS of knockon serve]
#
# WORKLOADS: a folder of *.jsonl. RESULTS: the cells, gone on with where they are there. REPORT: gets
# report.md, report.html, three plots, and results.tar.gz with all cells.
# For a bare machine: it runs on .venv where that is there, else on python3, whose import path may be
# added to by PYTHONPATH (fastapi, uvicorn, pydantic, pyzmq, msgspec, prometheus-client, gguf, httpx and
# matplotlib beside torch, transformers, typer and rich).
# May be set: MODEL (smollm2-135m; with KNOCKON_CACHE for where it was pulled, or a folder), METHODS,
# CONCURRENCY, REPEATS, NUM_PROMPTS, OUTPUT_LEN, DEVICE (cuda), SECONDS_LEFT (no bound: after so many
# the cell under way is given up and the report made of what there is), RESUME (a results.tar.gz to go
# on from), PYTHON.
set -euo pipefail

: "${1:?WORKLOADS, a folder}" "${2:?RESULTS, a folder}" "${3:?REPORT, a folder}"
mkdir -p "$2" "$3"
workloads=$(realpath "$1") results=$(realpath "$2") report=$(realpath "$3")
shift 3
own=() serve=(--device "${DEVICE:-cuda}")
while (($#)) && [ "$1" != -- ]; do own+=("$1") && shift; done
(($#)) && serve+=("${@:2}")

[ -n "${RESUME:-}" ] && [ ! -e "$results/settings.json" ] && tar xzf "$RESUME" -C "$results"
for kind in DOMINO DFLASH MTP METHODS; do
    [ -n "${!kind:-}" ] || continue
    value=${!kind}
    [ -e "$value" ] && value=$(realpath "$value")
    own+=("--$(tr '[:upper:]' '[:lower:]' <<<"$kind")" "$value")
done
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH}

status=0
timeout --foreground --signal=TERM "${SECONDS_LEFT:-0}" "$python" -m knockon bench matrix \
    "${MODEL:-smollm2-135m}" --out "$results" --workloads "$workloads" \
    --concurrency "${CONCURRENCY:-1,8,32}" --repeats "${REPEATS:-3}" \
    --num-prompts "${NUM_PROMPTS:-1=8,8=32,32=128}" --output-len "${OUTPUT_LEN:-512}" \
    "${own[@]}" -- "${serve[@]}" || status=$?
"$python" -m knockon bench report "$results" --out "$report" >/dev/null
tar czf "$report/results.tar.gz" -C "$results" settings.json cells
[ "$status" = 124 ] && echo "SECONDS_LEFT are over: the same command goes on" >&2
exit "$status"
