#!/usr/bin/env bash
# Methods × workloads × concurrencies on one or several GPUs, a fresh server for each cell, and the report.
#
#   DOMINO=PATH [DFLASH=PATH] [MTP=PATH] bash benchmarks/matrix_h200.sh WORKLOADS RESULTS REPORT \
#       [OPTIONS of knockon bench matrix] [-- OPTIONS of knockon serve]
#
# WORKLOADS: a folder of *.jsonl. RESULTS: the cells, gone on with where they are there. REPORT: gets
# report.md, report.html, three plots, and results.tar.gz with all cells.
# For a bare machine: it runs on .venv where that is there, else on python3, whose import path may be
# added to by PYTHONPATH (fastapi, uvicorn, h11, pydantic, pyzmq, msgspec, prometheus-client,
# gguf, aiohttp and matplotlib beside torch, transformers, typer and rich).
# May be set: MODEL (smollm2-135m; with KNOCKON_CACHE for where it was pulled, or a folder), METHODS,
# CONCURRENCY (1,8,32), REPEATS (3), NUM_PROMPTS (4 for each request in flight, 8 for one), OUTPUT_LEN
# (512), DEVICE (cuda), PYTHON, and
# - SERVERS_AHEAD (8): servers that stand ready beside a cell's own; see knockon bench matrix --help,
# - GPUS (1): so many runs side by side, each on a GPU and on its part of the cores, each with its share
#   of workloads and concurrencies, all into RESULTS,
# - SECONDS_LEFT (no bound): after so many the cells under way are given up and the report made of
#   what there is,
# - RESUME: a results.tar.gz to go on from, with whatever number of GPUs.
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

gpus=${GPUS:-1}
IFS=, read -ra visible <<<"${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $((gpus - 1)))}"
if ((${#visible[@]} < gpus)); then
    echo "error: GPUS=$gpus, but CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES" >&2
    exit 2
fi

concurrency=${CONCURRENCY:-1,8,32} counts=
for many in ${concurrency//,/ }; do
    [[ $many =~ ^[1-9][0-9]*$ ]] || continue # the command says what is wrong with it
    counts+=,$many=$((many > 1 ? 4 * many : 8))
done
counts=${NUM_PROMPTS:-${counts#,}}

# The cores of a share: what another share's servers take to start is not taken from its own.
cores() {
    "$python" - "$1" "$gpus" <<'EOF'
import os, sys
part, parts = map(int, sys.argv[1:])
mine = sorted(os.sched_getaffinity(0))
count = max(1, len(mine) // parts)
print(",".join(map(str, mine[(part - 1) * count : part * count] or mine)))
EOF
}

measure() { # I: the I-th share, in place of the shell that calls it
    local pinned=()
    if ((gpus > 1)); then
        export CUDA_VISIBLE_DEVICES=${visible[$1 - 1]}
        command -v taskset >/dev/null && pinned=(taskset -c "$(cores "$1")")
    fi
    exec timeout --foreground --signal=TERM "${SECONDS_LEFT:-0}" "${pinned[@]}" "$python" -m knockon \
        bench matrix "${MODEL:-smollm2-135m}" --out "$results" --workloads "$workloads" \
        --concurrency "$concurrency" --repeats "${REPEATS:-3}" \
        ${counts:+--num-prompts "$counts"} --output-len "${OUTPUT_LEN:-512}" \
        --servers-ahead "${SERVERS_AHEAD:-8}" --share "$1/$gpus" "${own[@]}" -- "${serve[@]}"
}

pids=()
for ((share = 1; share <= gpus; share++)); do
    measure "$share" &
    pids+=($!)
done
trap 'kill -TERM "${pids[@]}" 2>/dev/null || true' INT TERM
status=0
for pid in "${pids[@]}"; do
    code=0
    wait "$pid" || code=$?
    while kill -0 "$pid" 2>/dev/null; do # a signal ended the wait, not the run
        code=0
        wait "$pid" || code=$?
    done
    ((code > status)) && status=$code
done
trap - INT TERM
# Refused, or only listed: there is nothing to report.
[ "$status" = 2 ] || [[ " ${own[*]} " == *" --dry-run "* ]] && exit "$status"
"$python" -m knockon bench report "$results" --out "$report" >/dev/null
tar czf "$report/results.tar.gz" -C "$results" settings.json cells
[ "$status" = 124 ] && echo "SECONDS_LEFT are over: the same command goes on" >&2
exit "$status"
